"""A process that gets a part of its processor."""

from __future__ import annotations

import os
import signal
import threading

SLICE_S = 0.01


class Slowed(threading.Thread):
    """Lets a process run one slice of every `times`, from outside."""

    def __init__(self, pid: int, times: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.times = pid, times
        self.over = threading.Event()

    def run(self) -> None:
        try:
            while not self.over.is_set():
                os.kill(self.pid, signal.SIGSTOP)
                self.over.wait(SLICE_S * (self.times - 1))
                os.kill(self.pid, signal.SIGCONT)
                self.over.wait(SLICE_S)
        except ProcessLookupError:
            return

    def end(self) -> None:
        self.over.set()
        self.join()
