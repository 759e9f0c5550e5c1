"""A job's directory from its archive: named by its content, unpacked once."""

from __future__ import annotations

import fcntl
import hashlib
import secrets
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from shoal.spec.private_file import open_lock_file
from shoal.spec.remote.file_requests import CodeArchive

READ_BYTES = 1 << 20


class WrongCodeError(Exception):
    """What arrived is not what was announced."""


@contextmanager
def code_directory(parent: Path, archive: CodeArchive) -> Iterator[tuple[Path, bool]]:
    """The directory of this content, and whether it must still be unpacked. Only one process at a time is here."""
    target = parent / archive.sha256
    parent.mkdir(parents=True, exist_ok=True)
    with open_lock_file(target.with_suffix(".lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield target, not target.is_dir()


def unpack_code(file: IO[bytes], archive: CodeArchive, target: Path) -> None:
    """Write the directory as a whole, or not at all. WrongCodeError for another content, or a damaged one."""
    found = hashlib.sha256()
    while data := file.read(READ_BYTES):
        found.update(data)
    if found.hexdigest() != archive.sha256:
        raise WrongCodeError("the job's code arrived with another SHA-256 than announced")
    file.seek(0)
    temporary = target.with_name(f".tmp-{secrets.token_hex(6)}")
    try:
        with tarfile.open(fileobj=file, mode="r:") as content:
            content.extractall(temporary, filter="data")
        temporary.mkdir(exist_ok=True)  # an empty archive
        temporary.rename(target)
    except tarfile.TarError as failure:
        raise WrongCodeError(f"the job's code cannot be unpacked: {failure}") from failure
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
