"""Storage of checkpoints: a directory, local or behind an fsspec URL, in which files appear completely or not at all.

Paths are relative to the directory and written with `/`. Torch-free.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from shoal.spec.private_file import open_lock_file

TEMP_PREFIX = ".tmp-"
LOCK_FILE = ".lock"
SWEEP_GRACE_S = 3600.0


class CheckpointFiles(Protocol):
    """The storage operations that a store needs. Failures are OSErrors."""

    where: str
    has_locks: bool
    """Whether `save_lock` keeps the sweeps of other processes out. If not, only its age protects a file."""

    def open(self, path: str) -> BinaryIO: ...

    def write(self, path: str, chunks: Iterable[memoryview | bytes]) -> None:
        """Write the file completely, or raise and leave nothing."""

    def remove(self, path: str) -> None:
        """Remove the file. No error if it does not exist."""

    def sizes(self, under: str = "") -> dict[str, int]:
        """Every file below `under` with its size in bytes; empty if there is no such directory."""

    def save_lock(self) -> AbstractContextManager[None]:
        """Held while a save relies on existing files. Shared: several saves may hold it."""

    def sweep_lock(self) -> AbstractContextManager[bool]:
        """Yields False if a save is in progress: then the caller must remove nothing."""

    def is_stale(self, path: str) -> bool:
        """Under `sweep_lock`: no save in progress can rely on this file."""


class LocalFiles:
    """A directory on this machine. Written files survive a power cut."""

    has_locks = True

    def __init__(self, where: str) -> None:
        self.where = where
        self._root = Path(where)

    def open(self, path: str) -> BinaryIO:
        return (self._root / path).open("rb")

    def write(self, path: str, chunks: Iterable[memoryview | bytes]) -> None:
        with atomic_replace(self._root / path) as temp, temp.open("wb") as file:
            file.writelines(chunks)

    def remove(self, path: str) -> None:
        (self._root / path).unlink(missing_ok=True)

    def sizes(self, under: str = "") -> dict[str, int]:
        top = self._root / under
        return {file.relative_to(self._root).as_posix(): size for file, size in _walk(top)}

    @contextlib.contextmanager
    def save_lock(self) -> Iterator[None]:
        with self._locked(fcntl.LOCK_SH):
            yield

    @contextlib.contextmanager
    def sweep_lock(self) -> Iterator[bool]:
        with self._locked(fcntl.LOCK_EX | fcntl.LOCK_NB) as alone:
            yield alone

    def is_stale(self, path: str) -> bool:
        return True

    @contextlib.contextmanager
    def _locked(self, mode: int) -> Iterator[bool]:
        """Yields whether the lock was taken. On a filesystem without locks saves work and sweeps never run."""
        make_directory(self._root)
        with open_lock_file(self._root / LOCK_FILE) as file:
            try:
                fcntl.flock(file, mode)
            except OSError:
                yield False
                return
            try:
                yield True
            finally:
                # Closing is not enough: a child forked meanwhile shares the open file, and with it the lock.
                fcntl.flock(file, fcntl.LOCK_UN)


class RemoteFiles:
    """A bucket or any other storage that fsspec reaches. Objects are uploaded completely or not at all.

    There are no locks, so an unreferenced blob is removed only when it is older than `grace_s`. A save in progress has
    written every blob that it relies on within that time, or finds the blob in one of its own manifests.
    """

    has_locks = False

    def __init__(self, where: str, *, grace_s: float = SWEEP_GRACE_S) -> None:
        import fsspec

        self.where = where
        self._fs, self._root = fsspec.core.url_to_fs(where)
        self._grace_s = grace_s

    def open(self, path: str) -> BinaryIO:
        return io.BytesIO(self._fs.cat_file(self._full_path(path)))

    def write(self, path: str, chunks: Iterable[memoryview | bytes]) -> None:
        full = self._full_path(path)
        self._fs.makedirs(full.rsplit("/", 1)[0], exist_ok=True)
        self._fs.pipe_file(full, b"".join(chunks))

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._full_path(path))

    def sizes(self, under: str = "") -> dict[str, int]:
        self._fs.invalidate_cache()
        try:
            found: dict[str, dict[str, Any]] = self._fs.find(self._full_path(under), detail=True)
        except FileNotFoundError:
            return {}
        start = len(self._root.rstrip("/")) + 1
        return {full[start:]: int(entry["size"]) for full, entry in found.items()}

    @contextlib.contextmanager
    def save_lock(self) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def sweep_lock(self) -> Iterator[bool]:
        yield True

    def is_stale(self, path: str) -> bool:
        try:
            changed = self._fs.modified(self._full_path(path)).timestamp()
        except (NotImplementedError, FileNotFoundError):
            return False
        return bool(time.time() - changed >= self._grace_s)

    def _full_path(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}".rstrip("/")


def open_files(where: str | os.PathLike[str]) -> CheckpointFiles:
    """The files at a local path or a URL. No directory is created before the first write."""
    text = os.fspath(where).removeprefix("file://")
    return RemoteFiles(text) if "://" in text else LocalFiles(text)


@contextlib.contextmanager
def atomic_replace(target: Path) -> Iterator[Path]:
    """A temporary path to write to. It replaces `target` when the block succeeds, and is removed when it raises."""
    make_directory(target.parent)
    temp = target.with_name(f"{TEMP_PREFIX}{secrets.token_hex(6)}-{target.name}")
    try:
        yield temp
        _fsync(temp)
        temp.replace(target)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    _fsync(target.parent)


def make_directory(path: Path) -> None:
    """Create the directory and its parents, and fsync each new entry."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        _fsync(path.parent)


def is_temp(path: str) -> bool:
    return path.rsplit("/", 1)[-1].startswith(TEMP_PREFIX)


def _fsync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _walk(top: Path) -> Iterator[tuple[Path, int]]:
    """Files and sizes. Files that another process removes meanwhile are left out."""
    for directory, _, names in os.walk(top):
        for name in names:
            file = Path(directory) / name
            with contextlib.suppress(FileNotFoundError):
                yield file, file.stat().st_size
