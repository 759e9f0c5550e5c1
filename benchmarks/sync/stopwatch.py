"""The overhead benchmark's models, with a stopwatch in each process: every worker writes a report of its own."""

from __future__ import annotations

import json
import os
from pathlib import Path

from benchmarks.overhead import models
from benchmarks.overhead.side_by_side import Numbers

WARM_STEPS = 20


def timed(model: str, *, steps: int, calls: int, reports: str) -> models.Stopwatch:
    """A model by its name, timed over `steps` steps after the warm-up, where a step makes `calls` forward passes."""
    first = WARM_STEPS * calls
    report = Path(reports, f"{os.getpid()}.json")
    return models.timed(model, first=first, last=first + steps * calls, report=str(report))


def steps_to_run(steps: int) -> int:
    """The window closes at the forward pass after the last step that counts."""
    return WARM_STEPS + steps + 1


def gather(reports: Path, *, workers: int) -> Numbers:
    """All processes of a run together: the time of the slowest, and the processor time of all."""
    found = [json.loads(path.read_text()) for path in reports.glob("*.json")]
    if len(found) != workers:
        raise RuntimeError(f"{workers} workers were to report, {len(found)} did")
    return {"wall_s": max(one["wall_s"] for one in found), "cpu_s": sum(one["cpu_s"] for one in found)}
