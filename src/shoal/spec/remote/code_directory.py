"""A job's directory from its archive: named by its content, unpacked once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from shoal.spec.private_file import open_lock_file
from shoal.spec.remote.file_requests import CodeArchive, is_inside

READ_BYTES = 1 << 20
MAX_CODE_FILES = 50_000
MAX_NAME_BYTES = 4096


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
    found, size_bytes = hashlib.sha256(), 0
    while data := file.read(READ_BYTES):
        found.update(data)
        size_bytes += len(data)
    if found.hexdigest() != archive.sha256 or size_bytes != archive.size_bytes:
        raise WrongCodeError("the job's code arrived with another SHA-256 or size than announced")
    file.seek(0)
    temporary = target.with_name(f".tmp-{secrets.token_hex(6)}")
    try:
        temporary.mkdir()
        _unpack_files(file, temporary)
        temporary.rename(target)
    except (tarfile.TarError, ValueError, FileExistsError, NotADirectoryError) as failure:
        raise WrongCodeError(f"the job's code cannot be unpacked: {failure}") from failure
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _unpack_files(file: IO[bytes], directory: Path) -> None:
    """Only what `pack_files` writes: files with names inside, each once. Not by `tarfile.extractall`: it follows links,
    makes sparse files of any size, and in some versions never ends or writes outside for forged headers."""
    name = b""
    for _ in range(2 * MAX_CODE_FILES + 1):  # names may be apart from their files, and the end is a header too
        header = file.read(tarfile.BLOCKSIZE)
        if not any(header):
            return
        info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        if info.type == tarfile.GNUTYPE_LONGNAME and 0 < info.size <= MAX_NAME_BYTES and not name:
            name = b"".join(_read(file, info.size)).rstrip(b"\0")
            continue
        path = os.fsdecode(name) if name else info.name
        if info.type != tarfile.REGTYPE or info.size < 0 or not is_inside(path):
            raise ValueError(f"it may not hold {path!r}")
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        with (directory / path).open("xb") as written:
            written.writelines(_read(file, info.size))
            os.fchmod(written.fileno(), 0o755 if info.mode & stat.S_IXUSR else 0o644)
        name = b""
    raise ValueError("it holds too many files")


def _read(file: IO[bytes], size_bytes: int) -> Iterator[bytes]:
    """The content of a file in an archive, and past what fills its last block."""
    for start in range(0, size_bytes, READ_BYTES):
        part = file.read(min(READ_BYTES, size_bytes - start))
        if len(part) < min(READ_BYTES, size_bytes - start):
            raise ValueError("a file in it is cut off")
        yield part
    file.seek(-size_bytes % tarfile.BLOCKSIZE, os.SEEK_CUR)
