"""The server process: `python -m shoal.paramserver.main --seat 4 --run DIR`. Started by an engine, never by hand.

It holds a part of the parameters and applies what workers push. It reads the job, but neither model nor data: the first
worker sends the model's layout.
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
from typing import Any

from shoal.events import EventWriter
from shoal.fleet.control_client import ControlClient
from shoal.fleet.driver_address import DriverAddress, read_driver_address
from shoal.fleet.process_main import connect_to_driver, hold_seat_lock, run_reporting_errors
from shoal.lanes.torch_setup import prepare_torch
from shoal.net.tls import TlsContexts
from shoal.paramserver.event_loop import ServerLoop
from shoal.paramserver.server import ServerConfig
from shoal.spec.certificates import tls_contexts_for
from shoal.spec.job import Job
from shoal.spec.load import load_run_job
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Attachment, View

ORPHAN_GRACE_S = 30.0
"""Seconds that a server stays after workers have given up on a missing driver: they may still save."""
STARTED_BY_ENGINE = Attachment(managed=True, can_save=True, needs_job=False)


def main() -> None:
    parser = argparse.ArgumentParser(prog="shoal.paramserver.main")
    parser.add_argument("--seat", type=int, required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--trace", action="store_true")
    arguments = parser.parse_args()
    paths = RunPaths.at(arguments.run)
    stream = EventWriter(paths.events, f"server-{arguments.seat}")
    sys.exit(run_reporting_errors(stream, lambda _: serve(paths, arguments.seat)))


def serve(paths: RunPaths, seat: int) -> None:
    job = load_run_job(paths.job)
    prepare_torch(job)
    run_server(
        paths,
        seat,
        server_config(job, paths),
        patience_s=job.elastic.patience_s,
        tls_contexts=tls_contexts_for(job),
    )


def run_server(
    paths: RunPaths,
    seat: int,
    config: ServerConfig,
    *,
    patience_s: float,
    on_view: Callable[[ServerLoop, View], None] = lambda server_loop, view: None,
    tls_contexts: TlsContexts | None = None,
) -> None:
    """Serve until SIGTERM, or until the driver has been gone for too long. `on_view` gets the driver's views."""
    contact = read_driver_address(paths.driver_address)
    assert contact is not None, "the driver writes its address before it starts servers"
    server_loop = ServerLoop(
        seat,
        contact.token,
        config,
        bind=contact.host,
        on_filled=lambda *of: report_filled(control_client, *of),
        tls_contexts=tls_contexts,
    )
    control_client = ControlClient(
        partial(read_driver_address, paths.driver_address),
        lambda: hello(server_loop, seat, read_driver_address(paths.driver_address)),
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


def server_config(job: Job, paths: RunPaths) -> ServerConfig:
    assert job.sync.kind == "server"
    codec = job.codec.model_dump() if job.codec.kind != "none" else None
    aware, store = job.sync.staleness_aware, paths.store(job.checkpoint.path)
    return ServerConfig(
        job.lane_count,
        job.sync.staleness_bound,
        staleness_aware=aware,
        codec=codec,
        cut_tensors=not job.clips_by_norm,
        checkpoint_path=store,
    )


def hello(server_loop: ServerLoop, seat: int, driver_address: DriverAddress | None) -> dict[str, Any]:
    table = server_loop.server.chunk_table
    return {
        "role": "server",
        "seat": seat,
        "key": driver_address.key(f"server-{seat}") if driver_address else "",
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
