"""What runs that are driven together know of their hosts: how full they are, and which cannot be reached."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

UNREACHABLE = "SH651"
"""The code of hosts that cannot be reached. Other errors of a host are for its owner to mend."""
GRACE_S = 10.0
"""A lost host that comes back so soon was never missing."""
MIN_MISSING_S, MAX_MISSING_S = 60.0, 300.0
"""After so long a missing host counts as there again: somebody must try it. The next time it takes twice as long."""


@dataclass
class _Loss:
    since_s: float
    until_s: float
    missing_s: float = MIN_MISSING_S


class HostUse:
    """Shared by the engines of runs that are driven together: trials, folds, jobs of a queue. Any thread may call any
    method: engines are closed in the background."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._processes = Counter[str]()
        self._known: set[str] = set()
        self._losses: dict[str, _Loss] = {}
        self._lock = threading.Lock()

    # ---- how full ----

    def take(self, host: str) -> None:
        with self._lock:
            self._processes[host] += 1

    def give_back(self, host: str) -> None:
        with self._lock:
            self._processes[host] -= 1

    def processes(self, host: str) -> int:
        with self._lock:
            return self._processes[host]

    # ---- lost hosts ----

    def find(self, host: str) -> None:
        """The host is ready."""
        with self._lock:
            self._known.add(host)
            self._losses.pop(host, None)

    def lose(self, host: str) -> None:
        """It was lost, or cannot be reached."""
        with self._lock:
            now, loss = self._clock(), self._losses.get(host)
            if loss is None:
                self._losses[host] = _Loss(now, now + GRACE_S + MIN_MISSING_S)
            elif now >= loss.until_s:
                loss.missing_s = min(2 * loss.missing_s, MAX_MISSING_S)
                loss.until_s = now + loss.missing_s

    def may_miss(self, host: str) -> bool:
        """Whether the others go on without it: it was ready for one of these runs, or is known to be lost."""
        with self._lock:
            return host in self._known or host in self._losses

    def is_lost(self, host: str) -> bool:
        """Whether it was lost, and has not been ready since."""
        with self._lock:
            return host in self._losses

    def is_missing(self, host: str) -> bool:
        """Whether no work should be planned for it now."""
        with self._lock:
            loss = self._losses.get(host)
            return loss is not None and loss.since_s + GRACE_S <= self._clock() < loss.until_s
