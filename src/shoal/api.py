"""Shoal from a script or a notebook: the same jobs, the same workers, the same runs as on the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import error
from shoal.jobs import predictions, run_dir, run_executor, run_index
from shoal.jobs.run_executor import OnEvent
from shoal.jobs.run_result import RunResult
from shoal.jobs.search.driver import OnUpdate, SearchOutcome, run_search
from shoal.jobs.search.space_file import search_fields
from shoal.spec.job import Job
from shoal.spec.load import check_job, load_job, load_run_job, make_job
from shoal.spec.resolve import calling_user_line
from shoal.spec.run_paths import cache_directory

if TYPE_CHECKING:
    from torch import nn


def run(
    job: Job | str | os.PathLike[str], *, runs: str | os.PathLike[str] = "runs", look: OnEvent | None = None
) -> RunResult:
    """Run a job (an object, or the path of a job file) and wait until it ends.

    `look(paths, event, state)` is called with every event; a reason that it returns stops the run at the next step
    boundary. A failed job raises its error.
    """
    _refuse_in_worker()
    checked = check_job(job) if isinstance(job, Job) else load_job(Path(job))
    return _raise_if_failed(run_executor.run(checked, runs=Path(runs), on_event=look))


def resume(
    run: str | os.PathLike[str],
    *,
    sets: Sequence[str] = (),
    runs: str | os.PathLike[str] = "runs",
    look: OnEvent | None = None,
) -> RunResult:
    """Resume a run that was stopped or crashed. `sets` change how it continues: `["shard=none", "workers=1"]`."""
    _refuse_in_worker()
    return _raise_if_failed(run_executor.resume(run_dir.find(str(run), Path(runs)), overrides=sets, on_event=look))


def search(
    job: Job | str | os.PathLike[str],
    *,
    space: Mapping[str, Any] | None = None,
    workers: int | None = None,
    runs: str | os.PathLike[str] = "runs",
    look: OnUpdate | None = None,
) -> SearchOutcome:
    """Search over jobs: the job's `search`, or `space` with the fields of one (or with the space alone).

    The outcome has the receipt, with the winner; `shoal.load(f"{name}/trial-{winner}")` is its model.
    """
    _refuse_in_worker()
    checked = job if isinstance(job, Job) else load_job(Path(job))
    if space is not None:
        checked = make_job({**checked.dump(), "search": search_fields(space)}, base_dir=checked.base_dir)
    return run_search(check_job(checked), runs=Path(runs), workers=workers, on_update=look)


def load(run: str | os.PathLike[str], *, runs: str | os.PathLike[str] = "runs", best: bool = False) -> nn.Module:
    """The trained model of a run, in evaluation mode, on the CPU: an object of your own class.

    `run` may be the directory `model` of a run alone, copied from another machine: it has the job and the code of the
    model, which is executed.
    """
    from shoal.checkpoint.export import load_weights
    from shoal.checkpoint.model_check import MODEL_INFO
    from shoal.lanes.sparse.embedding import sparse_tables
    from shoal.paramserver.sparse.offline import bind_checkpoint_rows
    from shoal.tasks.model import build_task

    if (Path(run) / MODEL_INFO).is_file():
        return _load_directory(Path(run))
    paths = run_dir.find(str(run), Path(runs))
    job = load_run_job(paths.job)
    model = build_task(job).model()
    model.load_state_dict(load_weights(run_index.find_weights(paths, job, best=best)))
    if tables := sparse_tables(model):
        bind_checkpoint_rows(tables, run_index.find_checkpoint(paths, job, best=best), seed=job.seed)
    return model.eval()


def _load_directory(directory: Path) -> nn.Module:
    from shoal.checkpoint.export import load_weights
    from shoal.checkpoint.model_code import read_model_info, unpack_code
    from shoal.tasks.model import build_task

    info = read_model_info(directory)
    own = Path(str(info["job"].get("base_dir", "")))
    base_dir = (
        own if own.is_dir() and directory.resolve().is_relative_to(own) else unpack_code(directory, cache_directory())
    )
    job = make_job({**info["job"], "base_dir": str(base_dir)}, base_dir=base_dir, check_names=False)
    model = build_task(job).model()
    model.load_state_dict(load_weights(directory))
    return model.eval()


def predict(
    run: str | os.PathLike[str],
    data: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] = "predictions.parquet",
    workers: int = 1,
    runs: str | os.PathLike[str] = "runs",
    best: bool = False,
) -> Path:
    """Write what the run's model says of new data without labels, a row for each row. Returns the path of the file."""
    _refuse_in_worker()
    paths = run_dir.find(str(run), Path(runs))
    return predictions.predict(paths, data=os.fspath(data), out=Path(out), workers=workers, best=best).out


def _raise_if_failed(result: RunResult) -> RunResult:
    if result.error is not None:
        raise result.error
    return result


def _refuse_in_worker() -> None:
    """A worker imports the user's script. Without a `__main__` guard the script would start the job again and again."""
    main: Any = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name.startswith(
        ("shoal.fleet.", "shoal.train.", "shoal.paramserver.")
    ):  # forked by a fork server, or started directly
        raise error(
            "SH608",
            "the script that a worker imports starts a run itself",
            where=calling_user_line(),
            fix="Put the call under: if __name__ == '__main__':",
        )
