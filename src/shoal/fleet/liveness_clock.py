"""A clock that counts only the time in which this process listens."""

from __future__ import annotations

import time


class LivenessClock:
    """Seconds in which messages could have been received. Call `tick` after each select. A gap longer than `max_gap_s`
    means that this process itself was frozen or starved: only `max_gap_s` of it count."""

    def __init__(self, max_gap_s: float) -> None:
        self._max_gap_s = max_gap_s
        self._ticked_at_s = time.monotonic()
        self.now_s = 0.0

    def tick(self) -> None:
        now = time.monotonic()
        self.now_s += min(now - self._ticked_at_s, self._max_gap_s)
        self._ticked_at_s = now

    def skip(self) -> None:
        """Do not count the time since the last tick: this process did not listen."""
        self._ticked_at_s = time.monotonic()
