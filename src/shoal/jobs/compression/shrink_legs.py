"""A run in two legs: the first trains the whole model, the second a smaller one from the first one's checkpoint."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from typing import Any

from shoal.errors import error
from shoal.events import EventWriter
from shoal.fleet.forkserver import ForkServer
from shoal.jobs import run_dir
from shoal.jobs.coroutines import Steps
from shoal.jobs.probes import probe_steps
from shoal.jobs.resume import has_finished, load_moved
from shoal.jobs.run_result import PAUSED, RunResult
from shoal.plan.compression import shrink_step
from shoal.spec.compression.steps import ModelShape
from shoal.spec.job import Job
from shoal.spec.run_paths import RunPaths, write_atomically

SECOND_LEG = "second-leg.json"
Drive = Callable[[Job, RunPaths, int | None], Steps[RunResult]]
"""Drives a leg, until it pauses at a step or to its end."""


def run_legs(
    job: Job, paths: RunPaths, *, drive: Drive, fork_server: ForkServer, until: int | None
) -> Steps[RunResult]:
    """The result of the second leg; of the first one if it did not come so far. `until` pauses the run as a whole."""
    second = _second_leg(paths)
    if second is None:
        answer = yield from probe_steps("shape", job, fork_server)
        step = shrink_step(job, int(answer["steps"]), [int(one) for one in answer["boundaries"]])
        result = yield from drive(job, paths, step if until is None else min(step, until))
        if result.status != PAUSED or (until is not None and until <= step):
            return result
        second = yield from _make_second(job, paths, fork_server)
    with run_dir.driver_lock(second):
        if has_finished(second):
            raise error("SH604", f"'{second.name}' has finished", where=str(second.root))
        return (yield from drive(load_moved(job, second), second, until))


def last_leg(paths: RunPaths) -> RunPaths:
    """The leg that has the result: the second, if the run has one."""
    return _second_leg(paths) or paths


def _second_leg(paths: RunPaths) -> RunPaths | None:
    """The second leg, if its first checkpoint is complete."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        found = RunPaths.at(paths.root.parent / str(json.loads((paths.root / SECOND_LEG).read_bytes())["run"]))
        if found.root.parent == paths.root.parent and found.job.is_file():
            return found
    return None


def _make_second(job: Job, paths: RunPaths, fork_server: ForkServer) -> Steps[RunPaths]:
    """The directory of the second leg with its first checkpoint. It becomes a run when its job is written; nothing
    stays of one that cannot be made."""
    second = run_dir.reserve(f"{job.name[:57]}-shrunk", paths.root.parent)
    try:
        answer = yield from probe_steps("shrink", job, fork_server, first=str(paths.root), second=str(second.root))
    except BaseException:
        shutil.rmtree(second.root, ignore_errors=True)
        raise
    shape = ModelShape.model_validate({"steps": answer["shape"]})
    update = {"name": second.name.rpartition("-")[0], "shape": shape, "shrink": None}
    run_dir.create(job.model_copy(update=update), paths.root.parent, reserved=second)
    before, after = (int(one) for one in answer["parameters"])
    _tell(second, f"it continues {paths.name} from step {answer['cut_at']} with {after:,} of {before:,} parameters")
    for name, why in list(answer["refused"].items())[:20]:
        _tell(second, f"'{name}' keeps its size: {why}")
    write_atomically(paths.root / SECOND_LEG, json.dumps({"run": second.name}) + "\n")
    _tell(paths, f"{second.name} continues it with a smaller model")
    return second


def _tell(paths: RunPaths, message: str) -> None:
    fields: dict[str, Any] = {"message": message}
    with contextlib.closing(EventWriter(paths.events, "driver")) as stream:
        stream.emit("note", **fields)
