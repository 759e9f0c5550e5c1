"""Faults as a readable script: watchers that end their own process, once each."""

import os
import resource
import signal
import threading
import time
from pathlib import Path


class KillAt:
    """kill -9 of oneself at each of these steps, `delay_s` after the step was committed."""

    def __init__(self, steps, marks, delay_s=0.0):
        self.steps = steps
        self.marks = Path(marks)
        self.delay_s = delay_s

    def watch(self, event):
        if event.kind != "step" or event.step not in self.steps:
            return
        try:
            (self.marks / f"killed-{event.step}").touch(exist_ok=False)
        except FileExistsError:
            return
        if self.delay_s:
            threading.Thread(target=self._later, daemon=True).start()
        else:
            self._now()

    def _later(self):
        time.sleep(self.delay_s)
        self._now()

    def _now(self):
        os.kill(os.getpid(), signal.SIGKILL)


class KillOnce:
    """kill -9 of oneself when this part is evaluated at this step."""

    def __init__(self, part, step, marks):
        self.part = part
        self.step = step
        self.mark = Path(marks) / "killed-once"

    def watch(self, event):
        here = event.kind == "evaluated" and (event["part"], event.step) == (self.part, self.step)
        if here and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class SmallDisk:
    """No file of this process may grow beyond a size, until a step: what a full disk does to a save."""

    def __init__(self, most_bytes, until=10**9):
        self.most_bytes = most_bytes
        self.until = until

    def watch(self, event):
        if event.kind == "step":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            most = self.most_bytes if event.step < self.until else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
