"""How full the hosts are with the processes of all runs of one driver process, so that the runs spread over them."""

from __future__ import annotations

import threading
from collections import Counter


class HostUse:
    """Shared by the engines of runs that are driven together: trials, folds, jobs of a queue. Any thread may call any
    method: engines are closed in the background."""

    def __init__(self) -> None:
        self._processes = Counter[str]()
        self._lock = threading.Lock()

    def take(self, host: str) -> None:
        with self._lock:
            self._processes[host] += 1

    def give_back(self, host: str) -> None:
        with self._lock:
            self._processes[host] -= 1

    def processes(self, host: str) -> int:
        with self._lock:
            return self._processes[host]
