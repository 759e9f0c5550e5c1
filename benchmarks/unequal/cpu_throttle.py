"""Throttle a process to a fraction of its processor time."""

from __future__ import annotations

import os
import signal
import threading

SLICE_S = 0.01


class CpuThrottle(threading.Thread):
    """Lets a process run one of every `times` time slices, by SIGSTOP and SIGCONT."""

    def __init__(self, pid: int, slowdown: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.slowdown = pid, slowdown
        self.stopped = threading.Event()

    def run(self) -> None:
        try:
            while not self.stopped.is_set():
                os.kill(self.pid, signal.SIGSTOP)
                self.stopped.wait(SLICE_S * (self.slowdown - 1))
                os.kill(self.pid, signal.SIGCONT)
                self.stopped.wait(SLICE_S)
        except ProcessLookupError:
            return

    def stop(self) -> None:
        self.stopped.set()
        self.join()
