"""Real processes for the measurements: whole Shoal runs, and plain scripts forked by the same fork server."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.overhead.samples import IMAGES, LABELS, TEXT
from benchmarks.report import environment
from shoal.fleet.engine import Launch
from shoal.fleet.engines.make import make_engine
from shoal.fleet.forkserver import ForkServer
from shoal.jobs import run_executor
from shoal.jobs.fork_servers import make_fork_server
from shoal.spec.engine import LocalEngineConfig
from shoal.spec.load import make_job
from shoal.spec.receipt import Receipt
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Seat

BATCH = {"mlp": 128, "cnn": 128, "gpt": 12}
PLAIN = "benchmarks.overhead.plain"


def open_fork_server() -> ForkServer:
    """One fork server for all sides: the same imports, environment and number of threads."""
    os.environ.update(environment())  # a fork server does not look into the current directory
    return make_fork_server(1, modules=[PLAIN])


def job(model: str, data: Path, *, steps: int, window: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """The benchmark's job as plain data. Other fields have their defaults."""
    text = {"kind": "text", "path": str(data / TEXT), "context": 64, "stride": 1}
    images = {"kind": "idx", "path": str(data / IMAGES), "target": str(data / LABELS)}
    return {
        "name": model,
        "model": {"name": "benchmarks.overhead.models:timed", "args": {"model": model, **window}},
        "loss": "CrossEntropyLoss",
        "optimizer": {"name": "AdamW", "args": {"lr": 1e-3}},
        "data": {"source": text if model == "gpt" else images},
        "batch_size": BATCH[model],
        "steps": steps,
        "export": [],
        **changes,
    }


def shoal_run(
    plain_job: dict[str, Any], runs: Path, fork_server: ForkServer, on_event: run_executor.OnEvent | None = None
) -> Receipt:
    outcome = run_executor.run(make_job(plain_job), runs=runs, on_event=on_event, fork_server=fork_server)
    if outcome.receipt is None:
        raise outcome.error or RuntimeError(f"the run is {outcome.status}")
    return outcome.receipt


def plain_run(asked: dict[str, Any], logs: Path, fork_server: ForkServer) -> None:
    engine = make_engine(LocalEngineConfig(), RunPaths.at(logs), fork_server)
    engine.start([Launch(Seat(number=0), PLAIN, (json.dumps(asked),))])
    while not (exits := engine.poll(1.0)):
        pass
    if exits[0].code != 0:
        raise RuntimeError(f"the plain loop failed, see {logs}")
