"""Full Shoal runs with lanes over workers and default settings, including events and checkpoints."""

from __future__ import annotations

from pathlib import Path

from benchmarks.overhead.runs import job, shoal_run
from benchmarks.sync.stopwatch import steps_to_run
from shoal.fleet.forkserver import ForkServer


def run(
    model: str, data: Path, *, steps: int, workers: int, lanes: int, reports: Path, runs: Path, fork_server: ForkServer
) -> None:
    """`workers` must divide `lanes`: a worker then makes the same number of forward passes in every step."""
    if lanes % workers:
        raise ValueError(f"{lanes} lanes cannot be dealt evenly to {workers} workers")
    watch = {"model": model, "steps": steps, "calls": lanes // workers, "reports": str(reports)}
    timed = {"name": "benchmarks.sync.stopwatch:timed", "args": watch}
    stay = {"balance": False}  # lanes that move would make other numbers of forward passes
    plain = job(model, data, steps=steps_to_run(steps), window={}, lanes=lanes, workers=workers, elastic=stay)
    shoal_run({**plain, "model": timed}, runs, fork_server)
