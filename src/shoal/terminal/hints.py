"""What is worth saying before a run begins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.errors import ErrorGroup
from shoal.spec.job import Job
from shoal.spec.load import load_job


def lanes_hint(job: Job, path: Path, overrides: Sequence[str]) -> str:
    """For a job of this file that was given other workers: where it has no `lanes` they follow, and the result with
    them. '' where the result is that of the file."""
    if job.lanes is not None:
        return ""
    try:
        written = load_job(path, overrides=overrides, check_names=False)
    except ErrorGroup:  # with its own workers it is no job at all
        return ""
    now, before = job.lane_count, written.lane_count
    if now == before:
        return ""
    return (
        f"`lanes` is left out and follows the workers: {now} instead of {before}, so the weights will be others. "
        f"With `lanes: {max(now, before)}` in the job they are the same for any number of workers."
    )
