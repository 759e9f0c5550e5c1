"""The server process of `shoal.server`: `python -m shoal.server.process --seat 1 --run DIR`. Started by an engine."""

from __future__ import annotations

import argparse
import sys

import torch

from shoal.errors import error
from shoal.events import Stream
from shoal.parallel.server.host import Host
from shoal.parallel.server.keeper import Terms
from shoal.parallel.server.orders import options_of
from shoal.parallel.server.shard import optimizer_of
from shoal.server.terms import PATIENCE_S, ServerTerms
from shoal.spec.paths import RunPaths
from shoal.spec.view import View
from shoal.train.server import hold
from shoal.train.worker import guarded


def main() -> None:
    parser = argparse.ArgumentParser(prog="shoal.server.process")
    parser.add_argument("--seat", type=int, required=True)
    parser.add_argument("--run", required=True)
    arguments = parser.parse_args()
    paths = RunPaths.at(arguments.run)
    stream = Stream(paths.events, f"server-{arguments.seat}")
    sys.exit(guarded(stream, lambda _: serve(paths, arguments.seat)))


def serve(paths: RunPaths, seat: int) -> None:
    torch.set_num_threads(1)
    terms = ServerTerms.read(paths.root)
    check(terms)
    known = Terms(terms.workers, terms.sync.bound, aware=terms.sync.staleness_aware)
    hold(paths, seat, known, patience_s=PATIENCE_S, seen=seen)


def check(terms: ServerTerms) -> None:
    """What only torch knows: whether the optimizer takes these arguments."""
    try:
        optimizer_of(terms.optimizer.name)(
            [torch.nn.Parameter(torch.zeros(1))], **options_of(dict(terms.optimizer.args))
        )
    except (TypeError, ValueError) as failure:
        raise error("SH701", str(failure), where="optimizer.args") from failure


def seen(host: Host, view: View) -> None:
    """Workers that left are not waited for."""
    host.excuse(view.leave)


if __name__ == "__main__":
    main()
