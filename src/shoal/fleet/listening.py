"""A clock that runs only while we listen."""

from __future__ import annotations

import time


class ListeningClock:
    """Time in which we could have heard something. `look` is called after each look at the sockets; a gap longer than
    `longest_nap_s` means that we were frozen or starved ourselves, and others are not to blame for that silence."""

    def __init__(self, longest_nap_s: float) -> None:
        self._longest_nap_s = longest_nap_s
        self._looked_at = time.monotonic()
        self.now_s = 0.0

    def look(self) -> None:
        now = time.monotonic()
        self.now_s += min(now - self._looked_at, self._longest_nap_s)
        self._looked_at = now

    def skip(self) -> None:
        """We did not listen since the last look."""
        self._looked_at = time.monotonic()
