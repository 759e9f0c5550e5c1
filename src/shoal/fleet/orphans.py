"""Processes of a run that outlived their driver, found by the locks of their seats."""

from __future__ import annotations

import fcntl
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from shoal.spec.private_file import open_lock_file
from shoal.spec.run_paths import SEAT_LOCK, RunPaths
from shoal.spec.view import Role, Seat


@dataclass(frozen=True)
class Orphan:
    seat: Seat
    pid: int


def find_orphans(paths: RunPaths) -> list[Orphan]:
    """Live processes of the run, by seat number. Locks of dead processes are removed."""
    found = [Orphan(seat, pid) for seat, file in _locks(paths) if (pid := _lock_holder(file)) is not None]
    return sorted(found, key=lambda one: one.seat.number)


def locked_seats(paths: RunPaths) -> list[Seat]:
    """The seats of processes that live, and of those that ended without leaving, by seat number."""
    return sorted((seat for seat, _ in _locks(paths)), key=lambda seat: seat.number)


def _locks(paths: RunPaths) -> Iterator[tuple[Seat, Path]]:
    for file in list(paths.root.glob(".seat-*.lock")):
        if named := SEAT_LOCK.fullmatch(file.name):
            yield Seat(number=int(named[1]), role=cast(Role, named[2])), file


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
