"""The server process: `python -m shoal.paramserver.main --seat 4 --run DIR`. Started by an engine, never by hand.

It holds a part of the parameters and applies what workers push. It reads the job, but neither model nor data: the first
worker sends the model's layout. With `--join HOST:PORT` it cannot open the run's directory: it gets the job, and
checkpoints, through the driver.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from shoal.checkpoint.driver_files import DriverConnections, DriverFiles
from shoal.checkpoint.files import CheckpointFiles, open_files
from shoal.events import EventWriter
from shoal.fleet.control_client import ControlClient
from shoal.fleet.driver_address import DriverAddress, read_driver_address
from shoal.fleet.process_main import (
    ApartIdentity,
    connect_to_driver,
    hold_seat_lock,
    own_address,
    run_reporting_errors,
)
from shoal.lanes.torch_setup import prepare_torch
from shoal.net.address import ANY_PORT
from shoal.net.tls import TlsContexts
from shoal.paramserver.event_loop import ServerLoop
from shoal.paramserver.server import ServerConfig
from shoal.spec.certificates import load_tls_contexts, tls_contexts_for
from shoal.spec.engine import parse_ports
from shoal.spec.job import Job
from shoal.spec.load import load_run_job
from shoal.spec.remote.file_requests import JOB_FILE
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Attachment, Seat, View

ORPHAN_GRACE_S = 30.0
"""Seconds that a server stays after workers have given up on a missing driver: they may still save."""
STARTED_BY_ENGINE = Attachment(managed=True, can_save=True, needs_job=False)


def main() -> None:
    parser = argparse.ArgumentParser(prog="shoal.paramserver.main")
    parser.add_argument("--seat", type=int, required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--join", default="")
    parser.add_argument("--tls", type=Path)
    parser.add_argument("--store", default="")
    arguments = parser.parse_args()
    paths = RunPaths.at(arguments.run)
    if arguments.join:
        contexts = load_tls_contexts(arguments.tls, where="--tls") if arguments.tls else None
        me = ApartIdentity.from_environment(Seat(number=arguments.seat, role="server"), arguments.join, contexts)
        unheard = EventWriter.to_callback(lambda row: None, me.seat.name)  # its errors are in its log, which is sent
        sys.exit(run_reporting_errors(unheard, lambda _: serve_apart(paths, me, store=arguments.store)))
    stream = EventWriter(paths.events, f"server-{arguments.seat}")
    sys.exit(run_reporting_errors(stream, lambda _: serve(paths, arguments.seat)))


def serve(paths: RunPaths, seat: int) -> None:
    """Serve with the run's directory."""
    job = load_run_job(paths.job)
    prepare_torch(job)
    run_server(
        paths,
        seat,
        server_config(job, paths.store(job.checkpoint.path)),
        patience_s=job.elastic.patience_s,
        ports=parse_ports(job.network.ports),
        tls_contexts=tls_contexts_for(job),
    )


def serve_apart(scratch: RunPaths, me: ApartIdentity, *, store: str = "") -> None:
    """Serve without the run's directory. `scratch` is the server's own. `store`: the URL of checkpoints, if they have
    one."""
    with contextlib.closing(DriverConnections(me.connect_for_files)) as connections:
        with DriverFiles(connections, "code").open(JOB_FILE) as file:
            scratch.job.write_bytes(file.read())
        job = load_run_job(scratch.job)
        prepare_torch(job)
        run_server(
            scratch,
            me.seat.number,
            server_config(job, store or DriverFiles(connections, "checkpoints")),
            patience_s=job.elastic.patience_s,
            ports=parse_ports(job.network.ports),
            tls_contexts=me.tls_contexts,
            me=me,
        )


def run_server(
    paths: RunPaths,
    seat: int,
    config: ServerConfig,
    *,
    patience_s: float,
    on_view: Callable[[ServerLoop, View], None] = ServerLoop.set_view,
    ports: range = ANY_PORT,
    tls_contexts: TlsContexts | None = None,
    me: ApartIdentity | None = None,
) -> None:
    """Serve until SIGTERM, or until the driver has been gone for too long. `on_view` gets the driver's views. `me` is
    given if `paths` is not the run's directory."""
    find_driver = (lambda: me.driver) if me else partial(read_driver_address, paths.driver_address)
    contact = find_driver()
    assert contact is not None, "the driver writes its address before it starts servers"
    server_loop = ServerLoop(
        seat,
        contact.token,
        config,
        bind=own_address(contact) if me else contact.host,
        ports=ports,
        on_filled=lambda *of: report_filled(control_client, *of),
        tls_contexts=tls_contexts,
    )
    control_client = ControlClient(
        find_driver,
        lambda: hello(server_loop, seat, key=me.key if me else seat_key(seat, find_driver())),
        heartbeat=lambda: heartbeat(server_loop, control_client, patience_s),
        on_view=lambda view: on_view(server_loop, view),
        on_chunk_table=server_loop.set_chunk_table,
        tls_contexts=tls_contexts,
    )
    signal.signal(signal.SIGTERM, lambda *_: server_loop.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with hold_seat_lock(paths, seat, role="server"), contextlib.closing(control_client):
        connect_to_driver(control_client)
        server_loop.run()
        control_client.send("bye")


def server_config(job: Job, checkpoints: str | CheckpointFiles) -> ServerConfig:
    assert job.sync.kind == "server"
    codec = job.codec.model_dump() if job.codec.kind != "none" else None
    aware = job.sync.staleness_aware
    return ServerConfig(
        job.lane_count,
        job.sync.staleness_bound,
        staleness_aware=aware,
        codec=codec,
        cut_tensors=not job.clips_by_norm,
        checkpoints=open_files(checkpoints) if isinstance(checkpoints, str) else checkpoints,
        waits_for_views=True,
    )


def seat_key(seat: int, driver_address: DriverAddress | None) -> str:
    return driver_address.key(f"server-{seat}") if driver_address else ""


def hello(server_loop: ServerLoop, seat: int, *, key: str) -> dict[str, Any]:
    table = server_loop.server.chunk_table
    return {
        "role": "server",
        "seat": seat,
        "key": key,
        "attachment": STARTED_BY_ENGINE.model_dump(),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "address": server_loop.endpoint.address.model_dump(),
        "table": table.model_dump(mode="json") if table else None,
    }


def heartbeat(server_loop: ServerLoop, control_client: ControlClient, patience_s: float) -> dict[str, Any]:
    if control_client.driver_silence_s > patience_s + ORPHAN_GRACE_S:
        server_loop.stop()
    return {"phase": "serving", "served": server_loop.stats()}


def report_filled(control_client: ControlClient, seat: int, chunk_table_number: int) -> None:
    control_client.send("filled", seat=seat, table=chunk_table_number)


if __name__ == "__main__":
    main()
