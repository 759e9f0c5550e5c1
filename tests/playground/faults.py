"""Faults as a readable script: watchers that end their own process, once each."""

import os
import re
import resource
import signal
import sys
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


class Script:
    """Carries out faults that are written as one would say them, each once:

        kill worker 2 at step 7 in exchange
        freeze worker 1 at step 5 in data
        hang worker 1 at step 5 in compute
        terminate worker 1 at step 5
        delay worker 0 at step 0 in data by 4000 ms
        kill worker 3 while source
        kill worker 1 while catching up after 2 ms
        kill all at step 12

    Worker n is who sits in seat n, `any` who comes first; `all` are all who sit in this run. What comes after `in` is
    a phase of the worker's pulse, what comes after `while` a deed that other methods do.
    """

    LINE = re.compile(
        r"(?P<act>kill|freeze|hang|terminate|delay) (?:worker (?P<seat>\d+)|(?P<who>any|all))"
        r"(?: at step (?P<step>\d+))?"
        r"(?: in (?P<phase>\w+)| while (?P<deed>source|feeding|catching up|joining|applying|writing|mirroring))?"
        r"(?: by (?P<by_ms>\d+) ms)?(?: after (?P<after_ms>\d+) ms)?"
    )
    PHASES = {"save": "saving"}

    def __init__(self, lines, marks):
        self.marks = Path(marks)
        self.seat = sys.argv[sys.argv.index("--seat") + 1] if "--seat" in sys.argv else ""
        self.run = sys.argv[sys.argv.index("--run") + 1]
        self.faults = {}
        for line in lines:
            found = self.LINE.fullmatch(line)
            if found is None:
                raise ValueError(f"not a fault: {line}")
            if found["who"] or found["seat"] == self.seat:
                self.faults[line] = found
        self._wrap()
        self._now(step=0, phase="building")

    def watch(self, event):
        pass

    def _wrap(self):
        """Production code has no hooks for faults: this process's classes are changed."""
        from shoal.checkpoint.writer import Writer
        from shoal.parallel.feeding import Feeder
        from shoal.parallel.peers import Peers
        from shoal.parallel.replica import Replica
        from shoal.parallel.state_door import StateDoor
        from shoal.parallel.sync.lanes import LanesSync
        from shoal.train.pulse import Pulse
        from shoal.train.shards import Shards

        self._around(Pulse, "enter", lambda pulse, phase, step: self._now(step=step, phase=phase), after=True)
        self._around(Feeder, "serve", lambda *_: self._now(deed="feeding"))
        self._around(StateDoor, "_admit", lambda *_: self._now(deed="source"))
        self._around(Peers, "fetch", lambda *_, **__: self._now(deed="catching up"))
        self._around(LanesSync, "reconfigure", lambda *_: self._now(deed="joining"))
        self._around(Replica, "apply", lambda replica, step, *_: self._now(step=step, deed="applying"))
        self._around(Writer, "write", lambda *_, **__: self._now(deed="writing"))
        self._around(Shards, "_keep_a_copy", lambda *_: self._now(deed="mirroring"))

    @staticmethod
    def _around(kind, name, act, *, after=False):
        method = getattr(kind, name)

        def instead(self, *args, **kwargs):
            if not after:
                act(self, *args, **kwargs)
            found = method(self, *args, **kwargs)
            if after:
                act(self, *args, **kwargs)
            return found

        setattr(kind, name, instead)

    def _now(self, *, step=None, phase=None, deed=None):
        for line, fault in list(self.faults.items()):
            there = fault["step"] is None or step == int(fault["step"])
            wanted = self.PHASES.get(fault["phase"], fault["phase"])
            if fault["deed"] or wanted:
                there = there and (deed, phase) == (fault["deed"], wanted)
            if there and phase != "waiting" and self._mark(line):
                del self.faults[line]
                self._later(fault) if fault["after_ms"] else self._do(fault)

    def _mark(self, line):
        try:
            (self.marks / f"{line}.fired").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _later(self, fault):
        timer = threading.Timer(int(fault["after_ms"]) / 1000, self._do, [fault])
        timer.daemon = True
        timer.start()

    def _do(self, fault):
        if fault["act"] == "delay":
            time.sleep(int(fault["by_ms"]) / 1000)
        elif fault["act"] == "hang":
            self._hang()
        else:
            number = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "terminate": signal.SIGTERM}[fault["act"]]
            for pid in self._others() if fault["who"] == "all" else []:
                os.kill(pid, number)
            os.kill(os.getpid(), number)

    def _hang(self):
        while True:
            time.sleep(0.05)

    def _others(self):
        pids = {int(file.read_text() or 0) for file in Path(self.run).glob(".seat-*.worker.lock")}
        return pids - {0, os.getpid()}
