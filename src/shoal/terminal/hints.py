"""Hints that are shown before a run starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.errors import ErrorGroup
from shoal.spec.job import Job
from shoal.spec.load import load_job


def lanes_hint(job: Job, path: Path, overrides: Sequence[str]) -> str:
    """A warning that a different number of workers changes the result, because the job file has no `lanes`; '' if the
    result is the same as with the file's own number."""
    if job.lanes is not None:
        return ""
    try:
        written = load_job(path, overrides=overrides, check_names=False)
    except ErrorGroup:  # the file is not valid with its own number of workers
        return ""
    now, before = job.lane_count, written.lane_count
    if now == before:
        return ""
    return (
        f"`lanes` is left out and follows the workers: {now} instead of {before}, so the weights will be others. "
        f"With `lanes: {max(now, before)}` in the job they are the same for any number of workers."
    )
