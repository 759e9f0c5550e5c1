"""The server process: `python -m shoal.train.server --seat 4 --run DIR`. Started by an engine, never by hand.

It holds a part of the parameters and does what workers push. It knows the job, and neither model nor data: their shape
comes from the first worker.
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

from shoal.events import Stream
from shoal.fleet.contact import read_contact
from shoal.fleet.tie import Tie
from shoal.parallel.server.host import Host
from shoal.parallel.server.keeper import Terms
from shoal.spec.certificates import certificates_of
from shoal.spec.job import Job
from shoal.spec.load import load_job
from shoal.spec.paths import RunPaths
from shoal.spec.view import View
from shoal.train.build import store_path
from shoal.train.worker import WELCOME_S, guarded, prepare_torch, seat_taken
from shoal.wire import tls

ALONE_S = 30.0
"""How long a server stays after the workers' patience with a missing driver has ended: they may still save."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="shoal.train.server")
    parser.add_argument("--seat", type=int, required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--trace", action="store_true")
    arguments = parser.parse_args()
    paths = RunPaths.at(arguments.run)
    stream = Stream(paths.events, f"server-{arguments.seat}")
    sys.exit(guarded(stream, lambda _: serve(paths, arguments.seat)))


def serve(paths: RunPaths, seat: int) -> None:
    job = load_job(paths.job, check_names=False)
    tls.use(certificates_of(job))
    prepare_torch(job)
    hold(paths, seat, terms_of(job, paths), patience_s=job.engine.patience_s)


def hold(
    paths: RunPaths,
    seat: int,
    terms: Terms,
    *,
    patience_s: float,
    seen: Callable[[Host, View], None] = lambda host, view: None,
) -> None:
    """Until it is told to stop, or everybody is gone. `seen` gets the views that the driver publishes, if it does."""
    contact = read_contact(paths.control)
    assert contact is not None, "the driver writes it before it starts servers"
    host = Host(seat, contact.token, terms, bind=contact.host, filled=lambda *of: filled(tie, *of))
    tie = Tie(
        partial(read_contact, paths.control),
        lambda: hello(host, tie, seat),
        beat=lambda: beat(host, tie, patience_s),
        on_view=lambda view: seen(host, view),
        on_table=host.learn,
    )
    signal.signal(signal.SIGTERM, lambda *_: host.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with seat_taken(paths, seat, role="server"), contextlib.closing(tie):
        tie.connect(WELCOME_S)
        host.run()
        tie.say("bye")


def terms_of(job: Job, paths: RunPaths) -> Terms:
    assert job.sync.kind == "server"
    codec = job.codec.model_dump() if job.codec.kind != "none" else None
    aware, store = job.sync.staleness_aware, store_path(job, paths)
    return Terms(job.lane_count, job.sync.bound, aware=aware, codec=codec, store=store)


def hello(host: Host, tie: Tie, seat: int) -> dict[str, Any]:
    table = host.keeper.table
    return {
        "role": "server",
        "seat": seat,
        "local": True,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "address": host.endpoint.address.model_dump(),
        "table": table.model_dump(mode="json") if table else None,
    }


def beat(host: Host, tie: Tie, patience_s: float) -> dict[str, Any]:
    if tie.alone_s > patience_s + ALONE_S:
        host.stop()
    return {"phase": "serving", "served": host.served()}


def filled(tie: Tie, seat: int, table: int) -> None:
    tie.say("filled", seat=seat, table=table)


if __name__ == "__main__":
    main()
