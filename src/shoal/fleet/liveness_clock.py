"""A clock that runs only while we listen."""

from __future__ import annotations

import time


class LivenessClock:
    """Time in which we could have heard something. `look` is called after each look at the sockets; a gap longer than
    `longest_nap_s` means that we were frozen or starved ourselves, and others are not to blame for that silence."""

    def __init__(self, max_gap_s: float) -> None:
        self._max_gap_s = max_gap_s
        self._ticked_at_s = time.monotonic()
        self.now_s = 0.0

    def tick(self) -> None:
        now = time.monotonic()
        self.now_s += min(now - self._ticked_at_s, self._max_gap_s)
        self._ticked_at_s = now

    def skip(self) -> None:
        """We did not listen since the last look."""
        self._ticked_at_s = time.monotonic()
