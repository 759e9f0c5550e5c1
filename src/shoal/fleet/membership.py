"""Membership: how a worker learns its role. The driver publishes numbered views; it sends no other decisions.

Contract of every implementation: the numbers of views only grow. `wait` returns the newest view if its number is above
`after` and it concerns the seat, and otherwise waits for such a view. `newer` is cheap enough to call every step.
`shoal.fleet.control_client` is the implementation that real workers use.
"""

from __future__ import annotations

import threading
from typing import Protocol

from shoal.spec.view import View


class Membership(Protocol):
    def wait(
        self, seat: int, *, after: int, position: int | None, saved: bool = False, timeout_s: float | None = None
    ) -> View | None:
        """Report that this seat has stopped at `position` (`saved`: a checkpoint has that position), and wait for its
        next view. None after the timeout."""

    def newer(self, number: int) -> bool:
        """Whether there is a view above this number. Local, no network."""


class InMemoryMembership:
    """Views within one process: the fake that every other implementation is compared with."""

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
