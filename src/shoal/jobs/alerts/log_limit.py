"""Keeps the logs of a run below their limit, while processes write to them.

Bytes in the middle of a file are given back to the disk where they stand (a hole). So no line that comes meanwhile is
lost, a process need not open another file, and positions in the log stay what they were.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from shoal.spec.run_paths import RunPaths

KEEP_SIZE, PUNCH_HOLE = 1, 2
PAGE_BYTES = 4096
DISK_BLOCK_BYTES = 512


class LogLimit:
    """Belongs to the driver's thread. A log may occupy `limit_bytes`. Of a longer one, a quarter of that at its
    beginning is kept, and half of it at its end."""

    def __init__(self, paths: RunPaths, limit_bytes: int) -> None:
        self._paths, self._limit_bytes = paths, limit_bytes
        self._told: set[str] = set()
        self._works = True

    def enforce(self) -> list[str]:
        """Returns what the run should say: once for each log, and once if the file system cannot do it."""
        notes: list[str] = []
        for path in self._long_logs() if self._works else ():
            try:
                punch(path, start=self._limit_bytes // 4, keep_end=self._limit_bytes // 2)
            except OSError as failure:
                self._works = False
                return [*notes, f"logs are not bounded by limits.log: {failure.strerror}"]
            if path.name not in self._told:
                self._told.add(path.name)
                notes.append(f"{path.name} exceeds limits.log: its beginning and its end are kept")
        return notes

    def _long_logs(self) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._paths.logs):
                is_log = entry.name.endswith((".log", ".err")) and entry.is_file(follow_symlinks=False)
                if is_log and entry.stat().st_blocks * DISK_BLOCK_BYTES > self._limit_bytes:
                    yield Path(entry.path)


def punch(path: Path, *, start: int, keep_end: int) -> None:
    """Give back the whole pages from `start` to `keep_end` before the end. OSError if the file system cannot."""
    first = -(-start // PAGE_BYTES) * PAGE_BYTES
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        length = (os.fstat(descriptor).st_size - keep_end) // PAGE_BYTES * PAGE_BYTES - first
        call = ctypes.CDLL(None, use_errno=True).fallocate
        sizes = ctypes.c_int64(first), ctypes.c_int64(length)
        if length > 0 and call(descriptor, KEEP_SIZE | PUNCH_HOLE, *sizes) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
    finally:
        os.close(descriptor)
