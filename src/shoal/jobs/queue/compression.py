"""A compression in a queue: its training runs are runs of the daemon, and it goes on where it was."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.errors import ShoalError, error
from shoal.jobs import run_dir
from shoal.jobs.compression.compress import CompressRequest, check_compressible, compress, compressed_name
from shoal.jobs.compression.errands import SharedErrands, StoppedError
from shoal.jobs.coroutines import Steps
from shoal.jobs.queue.queue_store import QueueStore
from shoal.jobs.resume import has_finished
from shoal.jobs.run_executor import RunExecutor, RunHandle
from shoal.jobs.run_result import RunResult
from shoal.plan.queueing.work import CompressWork
from shoal.spec.job import Job
from shoal.spec.load import load_run_job, save_job
from shoal.spec.run_paths import RunPaths

Progress = Callable[[], None]


def find_parent(parent: str, store: QueueStore, sets: Sequence[str]) -> tuple[Job, CompressWork]:
    """The job to submit for a compression of a run, or of what job `parent` of the queue trains. `sets` change how it
    is compressed, and how that is run."""
    job, work = _job_of_entry(int(parent), store) if parent.isdecimal() else _job_of_run(parent, store.paths.runs)
    if job.fold_count > 1:
        fix = "Name one of its runs: shoal submit RUN/fold-0 --compress."
        raise error("SH614", f"the job has {job.fold_count} folds, and each has a model", where=parent, fix=fix)
    check_compressible(job)
    changed = _with_overrides(job, sets)
    if changed.resume_compatibility_sha256() != job.resume_compatibility_sha256():
        fix = "Change `compress` and how it is run: --set compress.target.size=25% --set workers=1..2"
        raise error("SH609", "a compression cannot train something else", where="--set", fix=fix)
    return changed.model_copy(update={"name": compressed_name(job)}), work


def _job_of_entry(number: int, store: QueueStore) -> tuple[Job, CompressWork]:
    entry = store.get(number)
    if entry.kind != "training":
        fix = "Name a run: shoal submit RUN --compress"
        raise error("SH609", f"job {number} is no training but a {entry.kind}", where="--compress", fix=fix)
    return store.job(number), CompressWork(of=number)


def _job_of_run(name: str, runs: Path) -> tuple[Job, CompressWork]:
    paths = run_dir.find(name, runs)
    job = load_run_job(paths.job)
    if job.fold_count == 1 and not has_finished(paths):
        raise error("SH606", f"'{paths.name}' has not finished", where=paths.name)
    return job, CompressWork(run=str(paths.root))


def _with_overrides(job: Job, sets: Sequence[str]) -> Job:
    with tempfile.TemporaryDirectory(prefix="shoal-") as scratch:
        file = Path(scratch) / "job.yaml"
        save_job(job, file)
        return load_run_job(file, overrides=[f"lanes={job.lane_count}", *sets])


def compression_steps(
    handle: RunHandle, executor: RunExecutor, job: Job, work: CompressWork, paths: RunPaths, on_answer: Progress
) -> Steps[RunResult]:
    """Begin in a reserved directory, or go on there. A result that misses the targets is a result."""
    handle.paths = paths
    errands = SharedErrands(handle)
    request = CompressRequest(
        RunPaths.at(work.run),
        paths.root.parent,
        reserved=paths,
        how=job,
        errands=errands,
        on_answer=on_answer,
    )
    fork_server = executor.fork_servers.for_job(job)
    try:
        yield from errands.carry_out(executor, lambda: compress(request, job.compress, fork_server=fork_server))
    except StoppedError as stopped:
        return RunResult(paths, str(stopped))
    except ShoalError as failure:
        return RunResult(paths, "failed", error=failure)
    return RunResult(paths, "finished")


def ended_compression(paths: RunPaths) -> RunResult | None:
    if not has_finished(paths):
        return None
    shutil.rmtree(paths.root / "rungs", ignore_errors=True)  # whoever wrote the receipt may have been killed before
    return RunResult(paths, "finished")
