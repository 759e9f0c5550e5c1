"""The job's code and weights on a machine that has none: fetched from the driver once, and kept by their content."""

from __future__ import annotations

import fcntl
import hashlib
import secrets
import shutil
import tarfile
from pathlib import Path
from typing import Any

from shoal.checkpoint.driver_files import DriverConnections, DriverFiles
from shoal.errors import error, from_os_error
from shoal.spec.job import Job
from shoal.spec.private_file import open_lock_file
from shoal.spec.remote.file_requests import CodeArchive, RemoteRun

READ_BYTES = 1 << 20


def fetch_job(connections: DriverConnections, job: Job, remote: RemoteRun, cache_dir: Path) -> Job:
    """The job with the paths that its code and weights have on this machine."""
    update: dict[str, Any] = {"base_dir": str(fetch_code(connections, remote.code, cache_dir))}
    if job.init_from is not None and (sent := remote.init_from):
        path = str(fetch_code(connections, sent.archive, cache_dir) / sent.path)
        update["init_from"] = job.init_from.model_copy(update={"path": path})
    if job.distil is not None and (sent := remote.teacher):
        path = str(fetch_code(connections, sent.archive, cache_dir) / sent.path)
        update["distil"] = job.distil.model_copy(update={"teacher": path})
    return job.model_copy(update=update)


def fetch_code(connections: DriverConnections, archive: CodeArchive, cache_dir: Path) -> Path:
    """The directory with the job's code and files. Only one worker of a machine fetches it. SH610 if the driver does
    not send what it announced."""
    target = cache_dir / "code" / archive.sha256
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open_lock_file(target.with_suffix(".lock")) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_dir():
                _fetch(connections, archive, target)
    except OSError as failure:
        known = from_os_error(failure)
        raise known or error("SH610", f"the job's code cannot be fetched: {failure}") from failure
    return target


def _fetch(connections: DriverConnections, archive: CodeArchive, target: Path) -> None:
    temporary = target.with_name(f".tmp-{secrets.token_hex(6)}")
    try:
        with DriverFiles(connections, "code").open(f"{archive.sha256}.tar") as file:
            found = hashlib.sha256()
            while data := file.read(READ_BYTES):
                found.update(data)
            if found.hexdigest() != archive.sha256:
                raise error("SH610", "the job's code arrived with another SHA-256 than announced")
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:") as content:
                content.extractall(temporary, filter="data")
        temporary.mkdir(exist_ok=True)  # an empty archive
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
