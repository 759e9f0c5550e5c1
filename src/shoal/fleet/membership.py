"""Membership: how a worker learns who it is. The driver publishes numbered views; nothing else goes down.

Contract of every body: views only grow in number; `wait` returns the newest view if it has a number above `after`
and concerns the seat, and else waits for one that does; `newer` is cheap enough for every step.
`shoal.fleet.tie` is the body that real workers use.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Protocol

from shoal.spec.paths import write_atomically
from shoal.spec.view import View


class Membership(Protocol):
    def wait(self, seat: int, *, after: int, position: int | None, timeout_s: float | None = None) -> View | None:
        """The next view for this seat, which stands at `position`. None when the time is over."""

    def newer(self, number: int) -> bool:
        """Is there a view above this number? Local, no network."""


class MemoryMembership:
    """Views within one process; the honest fake that every other body is compared with."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._view: View | None = None

    def wait(self, seat: int, *, after: int, position: int | None, timeout_s: float | None = None) -> View | None:
        def ready() -> bool:
            return self._view is not None and self._view.number > after and self._view.concerns(seat)

        with self._changed:
            return self._view if self._changed.wait_for(ready, timeout_s) else None

    def newer(self, number: int) -> bool:
        return self._view is not None and self._view.number > number

    def publish(self, view: View) -> None:
        """The driver's side."""
        with self._changed:
            if self._view is None or view.number > self._view.number:
                self._view = view
                self._changed.notify_all()


class FileMembership:
    """Views through one small file that is replaced atomically: for workers that share a disk with the driver."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._view: View | None = None
        self._look_again = 0.0

    def wait(self, seat: int, *, after: int, position: int | None, timeout_s: float | None = None) -> View | None:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            view = self._read()
            if view is not None and view.number > after and view.concerns(seat):
                return view
            if until is not None and time.monotonic() >= until:
                return None
            time.sleep(0.02)

    def newer(self, number: int) -> bool:
        now = time.monotonic()
        if now >= self._look_again:  # a look costs 10 µs, a step may take 200
            self._look_again = now + 0.02
            self._read()
        return self._view is not None and self._view.number > number

    def publish(self, view: View) -> None:
        old = self._read()
        if old is None or view.number > old.number:
            write_atomically(self._path, view.model_dump_json())

    def _read(self) -> View | None:
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return None
        stamp = (stat.st_ino, stat.st_mtime_ns)
        if stamp != self._stamp:
            self._view = View.model_validate_json(self._path.read_text(encoding="utf-8"))
            self._stamp = stamp
        return self._view
