"""The job that a resumed run continues with."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from shoal.errors import ErrorGroup, error
from shoal.fleet.orphans import find_orphans
from shoal.spec.job import Job
from shoal.spec.load import load_run_job, save_job
from shoal.spec.receipt import read_receipt_file
from shoal.spec.run_paths import RunPaths

MADE_OF_RUNS = {
    "rungs": ("compression", "`shoal resume {name}` without options goes on with it; one of a queue, `shoal release`."),
    "run-1": ("verification", "Begin it again; one of a queue goes on by itself, or after `shoal release`."),
}
"""Directories that tell what a directory with a job is, if it is no run, and how it goes on."""


def job_to_resume(paths: RunPaths, overrides: Sequence[str]) -> Job:
    """The run's job with these overrides applied.

    SH632 if it is a search, or something else that is made of runs. SH604 if it has finished. SH609 if the overrides
    change what it trains, or if workers of the run still live with the old settings.
    """
    if paths.search_journal.is_file():
        fix = f"shoal search resume {paths.name} goes on with it."
        raise error("SH632", f"'{paths.name}' is a search", where=str(paths.root), fix=fix)
    for inside, (what, fix) in MADE_OF_RUNS.items():
        if (paths.root / inside).is_dir():
            message = f"'{paths.name}' is a {what}"
            raise error("SH632", message, where=str(paths.root), fix=fix.format(name=paths.name))
    if has_finished(paths):
        raise error("SH604", f"'{paths.name}' has finished", where=str(paths.root))
    job = load_run_job(paths.job)
    if not overrides:
        return job
    changed = load_run_job(paths.job, overrides=[f"lanes={job.lane_count}", *overrides])
    if changed.resume_compatibility_sha256() != job.resume_compatibility_sha256():
        fix = "Change how it goes on (workers, shard, engine, checkpoint), or start a new run with `init_from`."
        where = " ".join(["--set", ", ".join(_identity_overrides(paths, job, overrides))]).strip()
        raise error("SH609", "a run that has begun cannot train something else", where=where, fix=fix)
    if left := [survivor.seat.name for one in paths.folds or [paths] for survivor in find_orphans(one)]:
        fix = "Resume it without --set, which takes them over; or wait until they have left."
        raise error("SH609", f"{', '.join(left)} of the run live on as they are", where="--set", fix=fix)
    return changed


def moved_to(like: Job, job: Job, paths: RunPaths) -> Job:
    """The job of a run that is resumed, with the engine and the network of `like`: that changes no result. As it is
    while processes of the run live, because another engine cannot take them over."""
    moved = job.model_copy(update={"engine": like.engine, "network": like.network})
    stays = moved == job or any(find_orphans(one) for one in paths.folds or [paths])
    return job if stays else moved


def load_moved(like: Job, paths: RunPaths) -> Job:
    """`moved_to` for the job of a directory, which is written if it changes. For who holds the directory's lock."""
    job = load_run_job(paths.job)
    moved = moved_to(like, job, paths)
    if moved is not job:
        save_job(moved, paths.job)
    return moved


def has_finished(paths: RunPaths) -> bool:
    """Whether the run has a receipt. A damaged one does not count: the driver of a resumed run writes it again from the
    events."""
    return read_receipt_file(paths.receipt).found is not None


def _identity_overrides(paths: RunPaths, job: Job, overrides: Sequence[str]) -> list[str]:
    """The overrides that change what the run trains, as far as each can be applied alone."""
    found = []
    for one in overrides:
        with contextlib.suppress(ErrorGroup):
            alone = load_run_job(paths.job, overrides=[f"lanes={job.lane_count}", one])
            found += (
                [one.partition("=")[0].strip()]
                if alone.resume_compatibility_sha256() != job.resume_compatibility_sha256()
                else []
            )
    return found
