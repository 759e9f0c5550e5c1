"""Where checkpoints lie: a directory of files that appear whole or not at all, local or behind an fsspec URL.

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

TEMP_PREFIX = ".tmp-"
LOCK_FILE = ".lock"
SWEEP_GRACE_S = 3600.0


class CheckpointFiles(Protocol):
    """What a store needs of a place. Failures are OSErrors."""

    where: str
    has_locks: bool
    """Whether `saving` keeps the sweeps of other processes out. If not, only its age protects a file."""

    def open(self, path: str) -> BinaryIO: ...

    def write(self, path: str, chunks: Iterable[memoryview | bytes]) -> None:
        """All of it under its name, or an error and nothing."""

    def remove(self, path: str) -> None:
        """Gone afterwards; it need not have been there."""

    def sizes(self, under: str = "") -> dict[str, int]:
        """Every file below `under` with its size in bytes; empty if there is no such directory."""

    def save_lock(self) -> AbstractContextManager[None]:
        """Held while a save relies on files that it found; many may hold it."""

    def sweep_lock(self) -> AbstractContextManager[bool]:
        """False if somebody is saving: then remove nothing."""

    def is_stale(self, path: str) -> bool:
        """Within `sweeping`: no save that is under way can rely on this file."""


class LocalFiles:
    """A directory of this machine. What was written survives a power cut."""

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
        """Where the filesystem knows no locks, saves go on and nobody ever sweeps."""
        make_directory(self._root)
        with (self._root / LOCK_FILE).open("ab") as file:
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
    """A bucket or any other place that fsspec reaches. Objects are put whole.

    Without locks, a blob that nobody refers to is removed only when older than `grace_s`: a save under way
    has put all that it relies on within that time, or finds it in a manifest of its own.
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
    """The files at a local path or a URL. Nothing is made until something is written."""
    text = os.fspath(where).removeprefix("file://")
    return RemoteFiles(text) if "://" in text else LocalFiles(text)


@contextlib.contextmanager
def atomic_replace(target: Path) -> Iterator[Path]:
    """A path to write to. It replaces `target` when the block ends well, and is removed otherwise."""
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
    """With its parents, each entered durably in its own parent."""
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
    """Files and sizes. What vanishes meanwhile, swept by another process, is left out."""
    for directory, _, names in os.walk(top):
        for name in names:
            file = Path(directory) / name
            with contextlib.suppress(FileNotFoundError):
                yield file, file.stat().st_size
