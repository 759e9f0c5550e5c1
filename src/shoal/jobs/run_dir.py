"""Run directories: making, finding and locking them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from shoal.errors import ShoalError, did_you_mean, error
from shoal.spec.job import Job
from shoal.spec.load import save_job
from shoal.spec.private_file import open_lock_file
from shoal.spec.run_paths import RunPaths

LOCK_TIMEOUT_S = 0.5
LOCK_RETRY_S = 0.01
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def check_runs(runs: Path) -> Path:
    """The directory of runs. SH625 if it is a URL: events are appended to, and files are locked, which only a directory
    of this machine allows."""
    text = os.fspath(runs)
    if _URL.match(text):
        bare = re.sub(r"^file:/+", "/", text)
        fix = f"Write --runs {bare}." if text.startswith("file:") else ""
        raise error("SH625", f"'{text}' is a URL", where="--runs", fix=fix)
    return runs


def create(job: Job, runs: Path, *, reserved: RunPaths | None = None) -> RunPaths:
    """Create the directory `<job name>-<n>`, or use the reserved one, and save the resolved job in it."""
    paths = reserve(job.name, runs) if reserved is None else reserved
    try:
        paths.root.mkdir(parents=True, exist_ok=True)  # a reserved one may have been removed
        save_job(job, paths.job)
    except OSError as failure:
        raise error("SH605", f"{runs}: {failure.strerror}", where=str(runs)) from failure
    return paths


def reserve(name: str, runs: Path) -> RunPaths:
    """A new directory `<name>-<n>`. It is a run once it has a job: `create` saves it there."""
    check_runs(runs)
    try:
        runs.mkdir(parents=True, exist_ok=True)
        number = 1 + max((_run_number(one, name) for one in _used_names(runs)), default=0)
        while True:
            try:
                (runs / f"{name}-{number}").mkdir()
                return RunPaths.at(runs / f"{name}-{number}")
            except FileExistsError:  # another driver has just created it
                number += 1
    except OSError as failure:
        raise error("SH605", f"{runs}: {failure.strerror}", where=str(runs)) from failure


MAX_DIGITS = 15
"""A longer number is part of a name that somebody else gave."""


def _used_names(runs: Path) -> Iterator[str]:
    """Also those of deleted runs, which may come back, and of runs that left only their tags."""
    yield from (path.name for path in runs.iterdir())
    for file in (runs / ".trash").glob("*/entry.json"):
        yield str(_fields_of(file).get("run"))
    yield from _fields_of(runs / ".tags.json")


def _fields_of(file: Path) -> dict[str, Any]:
    """Of a file in JSON; none if it is damaged."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _run_number(directory: str, name: str) -> int:
    prefix, _, tail = directory.rpartition("-")
    return int(tail) if prefix == name and tail.isdecimal() and len(tail) <= MAX_DIGITS else 0


def find(run: str, runs: Path) -> RunPaths:
    """Find a run by its path, its name, or `last`."""
    check_runs(runs)
    for candidate in (Path(run), runs / run):
        if (candidate / "job.yaml").is_file():
            return RunPaths.at(candidate)
    names = [paths.name for paths in list_runs(runs)]
    if run == "last" and names:
        return RunPaths.at(max((runs / n for n in names), key=lambda p: (p / "job.yaml").stat().st_mtime))
    raise error("SH601", f"there is no run '{run}' in {runs}", where=run, fix=did_you_mean(run, names))


def resolve_init_from(job: Job, runs: Path) -> Job:
    """The job with the runs in `init_from` and `distil` given by their paths instead of their names."""
    update: dict[str, Any] = {}
    if job.init_from is not None and job.init_from.path is not None:
        path = _run_path(job, job.init_from.path, runs, field="init_from.path")
        update["init_from"] = job.init_from.model_copy(update={"path": path})
    if job.distil is not None:
        path = _run_path(job, job.distil.teacher, runs, field="distil.teacher")
        update["distil"] = job.distil.model_copy(update={"teacher": path})
    return job.model_copy(update=update) if update else job


def _run_path(job: Job, path: str, runs: Path, *, field: str) -> str:
    if "/" in path or (Path(job.base_dir) / path).exists():
        return path
    try:
        return str(find(path, runs).root)
    except ShoalError as failure:
        raise failure.at(field) from None


def list_runs(runs: Path) -> list[RunPaths]:
    """All runs in a directory, oldest first. Costs one `stat` per run."""
    if not check_runs(runs).is_dir():
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
def readable(paths: RunPaths) -> Iterator[None]:
    """Around reading a run: SH605 if the operating system does not allow it."""
    try:
        yield
    except OSError as failure:
        fix = "Check the permissions of the run's directory, and that events.jsonl is a file."
        raise error("SH605", f"the run cannot be read: {failure}", where=str(paths.root), fix=fix) from failure


@contextlib.contextmanager
def driver_lock(paths: RunPaths) -> Iterator[None]:
    """Hold the run's driver lock: a run has one driver at a time. The lock is released when the process exits."""
    with _open_driver_lock(paths) as file:
        if not _try_lock(file, until_s=time.monotonic() + LOCK_TIMEOUT_S):
            pid = re.match(r"\d{1,9}", file.read(9))
            who = f"process {pid[0]}" if pid else "another process"
            raise error("SH602", f"'{paths.name}' is driven by {who}", where=str(paths.root))
        file.truncate(0)
        with contextlib.suppress(OSError):  # a full disk has no room for what only tells people who it is
            os.write(file.fileno(), str(os.getpid()).encode())
        yield


def _open_driver_lock(paths: RunPaths) -> IO[str]:
    try:
        return open_lock_file(paths.lock)
    except PermissionError as failure:
        fix = "Resume the run as the user who started it, or give its directory to this user (chown -R)."
        message = f"the lock cannot be used: {failure.strerror or failure}"
        raise error("SH626", message, where=str(paths.lock), fix=fix) from failure
    except OSError as failure:
        raise error(
            "SH605", f"the lock cannot be used: {failure.strerror or failure}", where=str(paths.lock)
        ) from failure


def _try_lock(file: IO[str], *, until_s: float) -> bool:
    """Tries again for a moment: a process that asks whether the run is driven holds the lock while it asks."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= until_s:
                return False
            time.sleep(LOCK_RETRY_S)
        else:
            return True


def is_driven(paths: RunPaths) -> bool:
    """Whether a live driver holds the run's lock. True also for a run of another user, whose lock cannot be opened: its
    status is then that of its last event."""
    try:
        lock = os.open(paths.lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


def current_status(status: str, paths: RunPaths) -> str:
    """The status, or "broken off" if the run has not ended and no driver is alive."""
    unfinished = status in ("starting", "training", "created")
    return "broken off" if unfinished and not is_driven(paths.parent_run) else status
