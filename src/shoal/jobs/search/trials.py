"""Trials as runs: their jobs, their results, and what is left of them on the disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import ErrorGroup, ShoalError
from shoal.events import read_events
from shoal.events.packed_file import has_content
from shoal.jobs.search.search_dir import SearchPaths
from shoal.plan.search.trial import Stretch
from shoal.spec.job import MAX_WORKERS, Job, WorkersConfig
from shoal.spec.receipt import read_receipt_file
from shoal.spec.run_paths import RunPaths
from shoal.spec.search.trial_job import make_trial_job

MetricRow = Mapping[str, float]
KEEP_ALL = 100_000
"""Checkpoints that a member of a population keeps: others may copy any of them."""
MACHINE_CODES = {"SH407", "SH411", "SH603", "SH618", "SH622"}
"""Failures that another machine may not have."""
SEARCH_CODES = {"SH503", "SH510", "SH602", "SH605", "SH607", "SH611", "SH625", "SH626", "SH627", "SH628", "SH629"}
"""Failures of the machine or of the user's set-up: every other trial would fail too, so the search stops."""


def trial_job(job: Job, changes: Mapping[str, Any], paths: SearchPaths) -> Job:
    """The job of a trial's run. Lanes are fixed, so that any number of workers gives the same bits. Raises `ErrorGroup`
    if the values do not make a valid job."""
    made = make_trial_job(job, changes, check_names=False)
    update: dict[str, Any] = {"lanes": made.lane_count, "export": [], "seeds": seeds_of(job)}
    if made.workers_per_replica == 1:
        update["workers"] = WorkersConfig(least=1, most=min(made.lane_count, MAX_WORKERS))
    kept = made.checkpoint
    if kept.path is not None:
        kept = kept.model_copy(update={"path": f"{kept.path.rstrip('/')}/{paths.name}"})
    if job.search is not None and job.search.policy.kind == "population":
        kept = kept.model_copy(update={"keep": KEEP_ALL})
    return made.model_copy(update={**update, "checkpoint": kept})


def seeds_of(job: Job) -> int:
    """The number of seeds of each trial."""
    return max(job.seeds, 1 if job.search is None else job.search.seeds)


def describe_failure(failure: BaseException, job: Job | None) -> str:
    """One line for the journal, the same everywhere: it does not name the worker, which is another one after a kill,
    and files are told as seen from the directory of the trial's `job`, or by their names."""
    first = failure.errors[0] if isinstance(failure, ErrorGroup) else failure
    if isinstance(first, ShoalError):
        where = _from_directory(first.where, job)
        where = Path(where).name if Path(where).is_absolute() else where
        place = f" ({where})" if where and not where.startswith(("worker-", "server-")) else ""
        return f"{first.code}: {_from_directory(first.message.splitlines()[0], job)}{place}"
    return _from_directory(str(first), job) or type(first).__name__


def _from_directory(text: str, job: Job | None) -> str:
    return text if job is None else text.replace(f"{job.base_dir.rstrip('/')}/", "")


def failure_code(failure: BaseException | None) -> str:
    first = failure.errors[0] if isinstance(failure, ErrorGroup) else failure
    return first.code if isinstance(first, ShoalError) else ""


# ---- results ----


def evaluations(paths: RunPaths) -> dict[int, MetricRow]:
    """The metrics of the validation data by step, as the run's events tell them."""
    if not has_content(paths.events):
        return {}
    return {
        event.step: dict(event["metrics"])
        for event in read_events(paths.events)
        if event.kind == "evaluated" and event["split"] == "validation" and event.step is not None
    }


def stretch_rows(paths: RunPaths, stretch: Stretch, boundaries: Sequence[int]) -> tuple[MetricRow, ...] | None:
    """The rows of a stretch, fewer if the run finished before; None if it is not that far, or if a row is missing."""
    if not boundaries:
        return _fold_rows(paths, stretch)
    found = evaluations(paths)
    wanted = boundaries[stretch.start : stretch.end]
    receipt = read_receipt_file(paths.receipt).own
    if receipt is not None:
        wanted = [step for step in wanted if step <= receipt.steps]
    elif stretch.end == len(boundaries):
        return None  # the last evaluation is there, but the run has not finished
    return tuple(found[step] for step in wanted) if all(step in found for step in wanted) else None


def rows_so_far(paths: RunPaths, stretch: Stretch, boundaries: Sequence[int]) -> tuple[MetricRow, ...]:
    """The rows of a stretch up to its failure."""
    if not boundaries:
        return ()
    found = evaluations(paths)
    return tuple(takewhile_known(found, boundaries[stretch.start : stretch.end]))


def takewhile_known(found: Mapping[int, MetricRow], steps: Sequence[int]) -> Iterator[MetricRow]:
    for step in steps:
        if step not in found:
            return
        yield found[step]


def _fold_rows(paths: RunPaths, stretch: Stretch) -> tuple[MetricRow, ...] | None:
    receipts = [read_receipt_file(paths.fold(number).receipt).own for number in range(stretch.start, stretch.end)]
    found = [receipt.metrics for receipt in receipts if receipt is not None]
    return tuple(found) if len(found) == len(receipts) else None


# ---- the disk ----


def forget(paths: RunPaths) -> None:
    """Delete the checkpoints of a trial. If it goes on, it is trained again from its start, to the same bits."""
    shutil.rmtree(paths.checkpoints, ignore_errors=True)
