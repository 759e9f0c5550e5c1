"""Run directories: making, finding and locking them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from shoal.errors import ShoalError, did_you_mean, error
from shoal.spec.job import Job
from shoal.spec.load import save_job
from shoal.spec.run_paths import RunPaths


def create(job: Job, runs: Path) -> RunPaths:
    """Create the directory `<job name>-<n>` and save the resolved job in it."""
    try:
        runs.mkdir(parents=True, exist_ok=True)
        number = 1 + max((_run_number(p.name, job.name) for p in runs.iterdir()), default=0)
        while True:
            try:
                (runs / f"{job.name}-{number}").mkdir()
                break
            except FileExistsError:  # another driver has just created it
                number += 1
        paths = RunPaths.at(runs / f"{job.name}-{number}")
        save_job(job, paths.job)
    except OSError as failure:
        raise error("SH605", f"{runs}: {failure.strerror}", where=str(runs)) from failure
    return paths


def _run_number(directory: str, name: str) -> int:
    prefix, _, tail = directory.rpartition("-")
    return int(tail) if prefix == name and tail.isdigit() else 0


def find(run: str, runs: Path) -> RunPaths:
    """Find a run by its path, its name, or `last`."""
    for candidate in (Path(run), runs / run):
        if (candidate / "job.yaml").is_file():
            return RunPaths.at(candidate)
    names = [paths.name for paths in list_runs(runs)]
    if run == "last" and names:
        return RunPaths.at(max((runs / n for n in names), key=lambda p: (p / "job.yaml").stat().st_mtime))
    raise error("SH601", f"there is no run '{run}' in {runs}", where=run, fix=did_you_mean(run, names))


def resolve_init_from(job: Job, runs: Path) -> Job:
    """The job with the run in `init_from` given by its path instead of its name."""
    init = job.init_from
    if init is None or init.path is None or "/" in init.path or (Path(job.base_dir) / init.path).exists():
        return job
    try:
        path = str(find(init.path, runs).root)
    except ShoalError as failure:
        raise failure.at("init_from.path") from None
    return job.model_copy(update={"init_from": init.model_copy(update={"path": path})})


def list_runs(runs: Path) -> list[RunPaths]:
    """All runs in a directory, oldest first. Costs one `stat` per run."""
    if not runs.is_dir():
        return []
    found = []
    with os.scandir(runs.resolve()) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                job = os.stat(f"{entry.path}/job.yaml")
                if stat.S_ISREG(job.st_mode):
                    path = Path(entry.path)
                    found.append((job.st_mtime, RunPaths.at(path) if entry.is_symlink() else RunPaths(path)))
    return [paths for _, paths in sorted(found, key=lambda one: one[0])]


@contextlib.contextmanager
def driver_lock(paths: RunPaths) -> Iterator[None]:
    """Hold the run's driver lock: a run has one driver at a time. The lock is released when the process exits."""
    with paths.lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as failure:
            file.seek(0)
            pid = file.read().strip() or "another process"
            raise error("SH602", f"'{paths.name}' is driven by process {pid}", where=str(paths.root)) from failure
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def is_driven(paths: RunPaths) -> bool:
    """Whether a live driver holds the run's lock."""
    try:
        with paths.lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def current_status(status: str, paths: RunPaths) -> str:
    """The status, or "broken off" if the run has not ended and no driver is alive."""
    unfinished = status in ("starting", "training", "created")
    return "broken off" if unfinished and not is_driven(paths.parent_run) else status
