"""The server process of `shoal.server`: `python -m shoal.server.main --seat 1 --run DIR`. Started by an engine."""

from __future__ import annotations

import argparse
import sys

import torch

from shoal.errors import error
from shoal.events import EventWriter
from shoal.fleet.process_main import run_reporting_errors
from shoal.paramserver.chunk_store import optimizer_class
from shoal.paramserver.event_loop import ServerLoop
from shoal.paramserver.main import run_server
from shoal.paramserver.server import ServerConfig
from shoal.paramserver.update_pipeline import options_from_json
from shoal.server.config import PATIENCE_S, StandaloneServerConfig
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import View


def main() -> None:
    parser = argparse.ArgumentParser(prog="shoal.server.main")
    parser.add_argument("--seat", type=int, required=True)
    parser.add_argument("--run", required=True)
    arguments = parser.parse_args()
    paths = RunPaths.at(arguments.run)
    stream = EventWriter(paths.events, f"server-{arguments.seat}")
    sys.exit(run_reporting_errors(stream, lambda _: serve(paths, arguments.seat)))


def serve(paths: RunPaths, seat: int) -> None:
    torch.set_num_threads(1)
    config = StandaloneServerConfig.read(paths.root)
    check_optimizer(config)
    server_config = ServerConfig(
        config.workers,
        config.sync.staleness_bound,
        staleness_aware=config.sync.staleness_aware,
        views=config.views,
    )
    run_server(paths, seat, server_config, patience_s=PATIENCE_S, on_view=ignore_lost_workers)


def check_optimizer(config: StandaloneServerConfig) -> None:
    """Check with torch that the optimizer accepts these arguments."""
    try:
        optimizer_class(config.optimizer.name)(
            [torch.nn.Parameter(torch.zeros(1))], **options_from_json(dict(config.optimizer.args))
        )
    except (TypeError, ValueError) as failure:
        raise error("SH701", str(failure), where="optimizer.args") from failure


def ignore_lost_workers(server_loop: ServerLoop, view: View) -> None:
    """Do not wait for workers that have left."""
    server_loop.ignore_lanes(view.leave)


if __name__ == "__main__":
    main()
