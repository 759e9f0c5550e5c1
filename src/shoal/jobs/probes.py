"""Questions that need torch or the data: asked in a process of its own, answered through a stream."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.errors import ErrorGroup, RunError, error_from_fields
from shoal.events import Event, EventReader
from shoal.fleet.engine import Exit, Launch
from shoal.fleet.engines.make import make_engine
from shoal.fleet.forkserver import ForkServer
from shoal.jobs.run_driver import fork_server_for
from shoal.spec.job import Job
from shoal.spec.load import save_job
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Seat

PROBE_MODULE = "shoal.train.probe_main"


def run_probe(
    probe: str,
    job: Job,
    *,
    on_event: Callable[[Event], None] | None = None,
    fork_server: ForkServer | None = None,
    **arguments: Any,
) -> Mapping[str, Any]:
    """The clerk's answer to `check`, `split`, `measure` or `evaluate`; its errors are raised here."""
    with tempfile.TemporaryDirectory(prefix="shoal-") as scratch, fork_server_for(fork_server, job) as mine:
        paths = RunPaths.at(scratch)
        save_job(job, paths.job)
        reader = EventReader(paths.events)
        answer: Mapping[str, Any] | None = None
        errors = []
        engine = make_engine(job.engine, paths, mine)
        engine.start([Launch(Seat(number=0), PROBE_MODULE, ("--run", scratch, probe, json.dumps(arguments)))])
        exits: list[Exit] = []
        while not exits:
            exits = engine.poll(0.1)
            for event in reader.read_new():
                if event.kind == "answer":
                    answer = event.fields
                elif event.kind == "failed":
                    errors.append(event.fields)
                elif on_event:
                    on_event(event)
        return _result(answer, errors, paths.error_log(0), exits[0].reason)


def _result(
    answer: Mapping[str, Any] | None, errors: list[dict[str, Any]], log: Path, reason: str
) -> Mapping[str, Any]:
    if errors and errors[0]["code"] == "BUG":
        raise RuntimeError(errors[0]["where"])
    if errors:
        raise ErrorGroup([error_from_fields(row) for row in errors])
    if answer is None:
        tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise RunError("SH603", f"the process ended by {reason}\n{tail}")
    return answer
