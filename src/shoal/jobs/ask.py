"""Questions that need torch or the data: asked in a process of its own, answered through a stream."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.errors import Problems, RunError, from_row
from shoal.events import Event, Reader
from shoal.fleet.engine import Exit
from shoal.fleet.engines.local import LocalEngine, Nursery
from shoal.jobs.run import borrowed
from shoal.spec.job import Job
from shoal.spec.load import save_job
from shoal.spec.paths import RunPaths
from shoal.spec.view import Seat

CLERK = "shoal.train.clerk"


def ask(
    question: str,
    job: Job,
    *,
    look: Callable[[Event], None] | None = None,
    nursery: Nursery | None = None,
    **arguments: Any,
) -> Mapping[str, Any]:
    """The clerk's answer to `check`, `split`, `measure` or `evaluate`; its errors are raised here."""
    with tempfile.TemporaryDirectory(prefix="shoal-") as scratch, borrowed(nursery, job) as mine:
        paths = RunPaths.at(scratch)
        save_job(job, paths.job)
        reader = Reader(paths.events)
        answer: Mapping[str, Any] | None = None
        errors = []
        engine = LocalEngine(mine, name=scratch, logs=paths.logs)
        engine.start([Seat(number=0)], CLERK, ["--run", scratch, question, json.dumps(arguments)])
        exits: list[Exit] = []
        while not exits:
            exits = engine.poll(0.1)
            for event in reader.new():
                if event.kind == "answer":
                    answer = event.fields
                elif event.kind == "failed":
                    errors.append(event.fields)
                elif look:
                    look(event)
        return _result(answer, errors, paths.errors(0), exits[0].reason)


def _result(
    answer: Mapping[str, Any] | None, errors: list[dict[str, Any]], log: Path, reason: str
) -> Mapping[str, Any]:
    if errors and errors[0]["code"] == "BUG":
        raise RuntimeError(errors[0]["where"])
    if errors:
        raise Problems([from_row(row) for row in errors])
    if answer is None:
        tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise RunError("SH603", f"the process ended by {reason}\n{tail}")
    return answer
