"""A cache on disk of what is made from data files: copies of remote files, tables as arrays."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from shoal.errors import error
from shoal.spec.private_file import open_lock_file

_FORMAT = 1
MAX_UNUSED_S = 30 * 24 * 3600
SMALL_BYTES = 64 << 20
"""Data up to this size is held in memory; larger data is memory-mapped."""


def cached_directory(cache_dir: Path, key: list[Any], make: Callable[[Path], None]) -> Path:
    """The directory that `make` filled for this key, now or in an earlier call.

    One process fills it while other processes wait. A directory under its final name is complete.
    """
    name = hashlib.sha256(json.dumps([_FORMAT, *key], default=str).encode()).hexdigest()[:32]
    final = cache_dir / name
    if final.exists():
        os.utime(final)
        return final
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f"{name}.lock"):
            if not final.exists():
                _remove_unused(cache_dir)
                _fill(final, make)
    except OSError as failure:
        raise error("SH313", f"{failure}", where=str(cache_dir)) from failure
    return final


_OF_PARSERS = (RecursionError, SyntaxError, TokenError)
"""numpy evaluates the header of an array as Python."""


@contextmanager
def reading_cache(directory: Path) -> Iterator[None]:
    """SH313 if what is read inside is damaged."""
    try:
        yield
    except (OSError, ValueError, EOFError, TypeError, LookupError, AttributeError, *_OF_PARSERS) as failure:
        fix = "Delete this directory: it is made again."
        raise error("SH313", f"its files are damaged: {failure}", where=str(directory), fix=fix) from None


def _remove_unused(cache_dir: Path) -> None:
    """Remove entries that were not used for `MAX_UNUSED_S`. A process that maps such a file keeps it until it ends."""
    for old in cache_dir.iterdir():
        if old.is_dir() and old.suffix != ".part" and time.time() - old.stat().st_mtime > MAX_UNUSED_S:
            shutil.rmtree(old, ignore_errors=True)


def _fill(final: Path, make: Callable[[Path], None]) -> None:
    part = final.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)  # left by a killed process; this process holds the lock
    part.mkdir()
    try:
        make(part)
        os.rename(part, final)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A kernel lock: it is released when its holder dies."""
    with open_lock_file(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class NpyWriter:
    """A .npy file that grows by rows."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb")  # noqa: SIM115  (closed by __exit__)
        self._dtype: np.dtype[Any] | None = None
        self._row_shape: tuple[int, ...] = ()
        self._row_count = 0

    def append(self, rows: np.ndarray[Any, Any]) -> None:
        if self._dtype is None:
            self._dtype, self._row_shape = rows.dtype, rows.shape[1:]
            self._write_header()
        self._file.write(np.ascontiguousarray(rows).data)
        self._row_count += len(rows)

    def __enter__(self) -> NpyWriter:
        return self

    def __exit__(self, *failure: object) -> None:
        with self._file:
            if self._dtype is not None and failure[0] is None:
                self._write_header()

    def _write_header(self) -> None:
        """numpy pads the header so that the first axis can grow: the header is rewritten in place."""
        assert self._dtype is not None
        self._file.seek(0)
        np.lib.format.write_array_header_1_0(
            self._file,
            {
                "descr": np.lib.format.dtype_to_descr(self._dtype),
                "fortran_order": False,
                "shape": (self._row_count, *self._row_shape),
            },
        )
