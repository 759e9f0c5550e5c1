"""Shoal from a script or a notebook: the same jobs, the same workers, the same runs as on the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import error
from shoal.jobs import catalogue, directory, drive
from shoal.jobs.drive import Look, Summary
from shoal.jobs.run import Outcome
from shoal.spec.job import Job
from shoal.spec.load import check_job, load_job

if TYPE_CHECKING:
    from torch import nn


def run(
    job: Job | str | os.PathLike[str], *, runs: str | os.PathLike[str] = "runs", look: Look | None = None
) -> Outcome | Summary:
    """Run a job (an object, or the path of a job file) and wait for its end.

    `look(paths, event, picture)` is called for everything that happens. A failed job raises its error.
    """
    _not_in_a_worker()
    checked = check_job(job) if isinstance(job, Job) else load_job(Path(job))
    return _raised(drive.run(checked, runs=Path(runs), look=look))


def resume(
    run: str | os.PathLike[str],
    *,
    sets: Sequence[str] = (),
    runs: str | os.PathLike[str] = "runs",
    look: Look | None = None,
) -> Outcome | Summary:
    """Go on with a run that was broken off. `sets` change how: `["shard=none", "workers=1"]`."""
    _not_in_a_worker()
    return _raised(drive.resume(directory.find(str(run), Path(runs)), sets=sets, look=look))


def load(run: str | os.PathLike[str], *, runs: str | os.PathLike[str] = "runs", best: bool = False) -> nn.Module:
    """The trained model of a run, in evaluation mode, on the CPU."""
    from shoal.checkpoint.export import load_weights
    from shoal.parallel.sparse.loaded import bind_saved
    from shoal.parallel.sparse.module import tables_of
    from shoal.train.model import build_task

    paths = directory.find(str(run), Path(runs))
    job = load_job(paths.job, check_names=False)
    model = build_task(job).model()
    model.load_state_dict(load_weights(catalogue.weights_of(paths, job, best=best)))
    if tables := tables_of(model):
        bind_saved(tables, catalogue.checkpoint_of(paths, job, best=best), seed=job.seed)
    return model.eval()


def _raised(outcome: Outcome | Summary) -> Outcome | Summary:
    if outcome.error is not None:
        raise outcome.error
    return outcome


def _not_in_a_worker() -> None:
    """A worker imports the user's script; without a guard the script would start the job again, for ever."""
    main: Any = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name.startswith(("shoal.fleet.", "shoal.train.")):  # forked by a nursery, or not
        raise error(
            "SH608",
            "the script that a worker imports starts a run itself",
            fix="Put the call under: if __name__ == '__main__':",
        )
