"""One change at a time, also of several processes."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from typing import IO


@contextlib.contextmanager
def locked(file: IO[str]) -> Iterator[None]:
    """Hold the lock of an open file, and close it."""
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
