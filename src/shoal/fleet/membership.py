"""Membership: how a worker learns who it is. The driver publishes numbered views; nothing else goes down.

Contract of every body: views only grow in number; `wait` returns the newest view if it has a number above `after`
and concerns the seat, and else waits for one that does; `newer` is cheap enough for every step.
`shoal.fleet.control_client` is the body that real workers use.
"""

from __future__ import annotations

import threading
from typing import Protocol

from shoal.spec.view import View


class Membership(Protocol):
    def wait(
        self, seat: int, *, after: int, position: int | None, saved: bool = False, timeout_s: float | None = None
    ) -> View | None:
        """The next view for this seat, which stands at `position`; `saved`: a checkpoint has all of that. None when the
        time is over."""

    def newer(self, number: int) -> bool:
        """Is there a view above this number? Local, no network."""


class InMemoryMembership:
    """Views within one process; the honest fake that every other body is compared with."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._view: View | None = None

    def wait(
        self, seat: int, *, after: int, position: int | None, saved: bool = False, timeout_s: float | None = None
    ) -> View | None:
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
