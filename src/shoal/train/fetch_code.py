"""The job's code on a machine that does not have it: fetched from the driver once, and kept by its content."""

from __future__ import annotations

from pathlib import Path

from shoal.checkpoint.driver_files import DriverConnections, DriverFiles
from shoal.errors import error, from_os_error
from shoal.spec.remote.code_directory import WrongCodeError, code_directory, unpack_code
from shoal.spec.remote.file_requests import CodeArchive


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
        known = from_os_error(failure)
        raise known or error("SH610", f"the job's code cannot be fetched: {failure}") from failure
    return target
