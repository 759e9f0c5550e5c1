"""The job's code and weights on a machine that has none: fetched from the driver once, and kept by their content."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from shoal.checkpoint.driver_files import DriverConnections, DriverFiles
from shoal.errors import error, from_os_error
from shoal.spec.job import Job
from shoal.spec.remote.code_directory import WrongCodeError, code_directory, unpack_code
from shoal.spec.remote.file_requests import CodeArchive, RemoteRun


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
    try:
        with code_directory(cache_dir / "code", archive) as (target, is_missing):
            if is_missing:
                with DriverFiles(connections, "code").open(f"{archive.sha256}.tar") as file:
                    unpack_code(file, archive, target)
    except WrongCodeError as failure:
        raise error("SH610", str(failure)) from failure
    except OSError as failure:
        doing = f"the job's code cannot be kept on {socket.gethostname()}"
        known = from_os_error(failure, doing=doing, where=str(cache_dir / "code"))
        raise known or error("SH610", f"the job's code cannot be fetched: {failure}") from failure
    return target
