"""Processes of a run that outlived their driver, found by the locks of their seats."""

from __future__ import annotations

import fcntl
import re
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from shoal.spec.private_file import open_lock_file
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Role, Seat

_LOCK = re.compile(r"\.seat-(\d{1,9})\.(worker|server)\.lock")


@dataclass(frozen=True)
class Orphan:
    seat: Seat
    pid: int


def find_orphans(paths: RunPaths) -> list[Orphan]:
    """Live processes of the run, by seat number. Locks of dead processes are removed."""
    found = []
    for file in paths.root.glob(".seat-*.lock"):
        named = _LOCK.fullmatch(file.name)
        if named and (pid := _lock_holder(file)) is not None:
            found.append(Orphan(Seat(number=int(named[1]), role=cast(Role, named[2])), pid))
    return sorted(found, key=lambda one: one.seat.number)


def _lock_holder(lock: Path) -> int | None:
    try:
        with open_lock_file(lock) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = re.fullmatch(r"[1-9]\d{0,8}", file.read(10))
                return int(pid[0]) if pid else None
        lock.unlink(missing_ok=True)  # its process is gone
    except OSError:  # removed meanwhile, or a file of another user: no process of this run
        pass
    return None
