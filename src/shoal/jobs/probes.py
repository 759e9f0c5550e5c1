"""Probes: questions that need torch or the data, answered by a separate process through a stream of events."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.errors import ErrorGroup, RunError, error_from_fields
from shoal.events import Event, EventReader
from shoal.fleet.engine import Launch
from shoal.fleet.engines.make import make_engine
from shoal.fleet.forkserver import ForkServer
from shoal.jobs.coroutines import Steps, run_steps
from shoal.jobs.fork_servers import ForkServerPool
from shoal.spec.engine import LocalEngineConfig
from shoal.spec.job import Job
from shoal.spec.load import save_job
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Seat

PROBE_MODULE = "shoal.train.probe_main"


class ProbeBugError(RuntimeError):
    """A bug ended the process. The message is its traceback; `what` is its last line."""

    def __init__(self, traceback: str, what: str) -> None:
        super().__init__(traceback)
        self.what = what


def run_probe(
    probe: str,
    job: Job,
    *,
    on_event: Callable[[Event], None] | None = None,
    fork_server: ForkServer | None = None,
    **arguments: Any,
) -> Mapping[str, Any]:
    """Run a probe (`check`, `split`, `measure`, `evaluate` or `shape`) on this machine, whatever the job's engine is,
    and return its answer. Raises its errors."""
    with ForkServerPool(fork_server) as fork_servers:
        return run_steps(probe_steps(probe, job, fork_servers.for_job(job), on_event=on_event, **arguments))


def probe_steps(
    probe: str,
    job: Job,
    fork_server: ForkServer,
    *,
    on_event: Callable[[Event], None] | None = None,
    **arguments: Any,
) -> Steps[Mapping[str, Any]]:
    """`run_probe` as steps that do not block. The process ends with the steps, even if they are closed early."""
    answer: Mapping[str, Any] | None = None
    errors: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-"))
        paths = RunPaths.at(scratch)
        save_job(job, paths.job)
        reader = EventReader(paths.events)
        engine = stack.enter_context(contextlib.closing(make_engine(LocalEngineConfig(), paths, fork_server)))
        engine.start([Launch(Seat(number=0), PROBE_MODULE, ("--run", scratch, probe, json.dumps(arguments)))])
        while True:
            exits = engine.poll(0)
            for event in reader.read_new():
                if event.kind == "answer":
                    answer = event.fields
                elif event.kind == "failed":
                    errors.append(event.fields)
                elif on_event:
                    on_event(event)
            if exits:
                if exits[0].start_error:
                    raise exits[0].start_error
                return _result(answer, errors, paths.error_log(0), exits[0].reason)
            yield [engine.fileno()]


def _result(
    answer: Mapping[str, Any] | None, errors: list[dict[str, Any]], log: Path, reason: str
) -> Mapping[str, Any]:
    if errors and errors[0]["code"] == "BUG":
        raise ProbeBugError(str(errors[0]["where"]), str(errors[0]["message"]))
    if errors:
        raise ErrorGroup([error_from_fields(row) for row in errors])
    if answer is None:
        tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise RunError("SH603", f"the process ended by {reason}\n{tail}")
    return answer
