"""Run a job and kill its workers from outside, one at a time, whenever all of them train."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.recovery.measure import Commit, Kill, Trace, recovery_s
from benchmarks.recovery.workload import Workload

LOOK_S = 0.02
WARM_STEPS = 20
START_TIMEOUT_S = 120.0
RECOVERY_TIMEOUT_S = 60.0
PAUSE_S = (2.0, 5.0)


class Tail:
    """The rows of a run as they are written. A side with another format brings its own tail."""

    def __init__(self, workload: Workload) -> None:
        self._paths = [Path(workload.directory, f"rows-{worker}.jsonl") for worker in range(workload.workers)]
        self._offsets = dict.fromkeys(self._paths, 0)

    def new(self) -> list[Commit]:
        return [Commit.from_line(line) for path in self._paths for line in self._lines(path)]

    def _lines(self, path: Path) -> list[str]:
        if not path.is_file():
            return []
        with path.open("rb") as file:
            file.seek(self._offsets[path])
            whole = file.read().rpartition(b"\n")[0]
        self._offsets[path] += len(whole) + bool(whole)
        return whole.decode().splitlines()


@dataclass
class Job:
    """A started job: its processes (the first is stopped last), its rows, and the commits so far.

    `prove` ends the job and returns whether its weights are those of an undisturbed run; None if the side does not
    claim that.
    """

    workload: Workload
    processes: list[subprocess.Popen[bytes]]
    tail: Tail
    prove: Callable[[], bool] | None = None
    commits: list[Commit] = field(default_factory=list)
    newest: dict[int, Commit] = field(default_factory=dict)

    def wait(self, until: Callable[[], bool], *, timeout_s: float) -> bool:
        """Wait until a condition holds. False if it does not in time, or if all processes have ended."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            ended = all(process.poll() is not None for process in self.processes)
            self._read()
            if until():
                return True
            if ended:
                return False
            time.sleep(LOOK_S)
        return False

    def _read(self) -> None:
        fresh = self.tail.new()
        self.commits += fresh
        self.newest |= {one.worker: one for one in fresh}

    def close(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for one in self.newest.values():  # processes that no agent is left to stop
            if self._is_ours(one.pid):
                os.kill(one.pid, signal.SIGKILL)

    def _is_ours(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            return self.workload.directory.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        return False


Start = Callable[[Workload], Job]


@dataclass(frozen=True)
class Killer:
    """Number of kills, random generator, and progress callback."""

    kills: int
    rng: random.Random
    say: Callable[[str], None] = print

    def runs(self, start: Start, workload: Callable[[], Workload]) -> list[Trace]:
        """Run until all kills are done. A run that does not recover is replaced by another."""
        traces: list[Trace] = []
        while (left := self.kills - sum(len(trace.kills) for trace in traces)) > 0:
            job = start(workload())
            try:
                traces.append(self._judged(job, self._run(job, left)))
            finally:
                job.close()
        return traces

    def _judged(self, job: Job, trace: Trace) -> Trace:
        if job.prove is None:
            return trace
        proven = not trace.failure and job.prove()
        self.say(f"  the weights of an undisturbed run: {'yes' if proven else 'no'}")
        return replace(trace, proven=proven)

    def _run(self, job: Job, most: int) -> Trace:
        if not job.wait(lambda: _all_reached(job, WARM_STEPS), timeout_s=START_TIMEOUT_S):
            raise RuntimeError(f"no steps after {START_TIMEOUT_S:.0f} s, see the logs in {job.workload.directory}")
        kills: list[Kill] = []
        failure = ""
        while len(kills) < most and not failure:
            job.wait(lambda: False, timeout_s=self.rng.uniform(*PAUSE_S))
            around = len(job.commits) - WARM_STEPS  # reading all rows would take processor time from the job
            kill, pid = self._kill(job)
            kills.append(kill)
            failure = _failure(job, kill, pid, around)
            seconds = recovery_s(job.commits[around:], kill, step_s=0)
            self.say(f"  kill {len(kills)} of {most}: {failure or f'{seconds:.2f} s'}")
        return Trace(job.commits, kills, failure)

    def _kill(self, job: Job) -> tuple[Kill, int]:
        victim = self.rng.choice(sorted(job.newest.items()))[1]
        now = time.time()
        os.kill(victim.pid, signal.SIGKILL)
        job.wait(lambda: True, timeout_s=LOOK_S)  # read rows that were written before the kill
        return Kill(now, victim.worker), victim.pid


def _all_reached(job: Job, step: int) -> bool:
    return len(job.newest) == job.workload.workers and all(one.step >= step for one in job.newest.values())


def _failure(job: Job, kill: Kill, pid: int, around: int) -> str:
    """Why the job did not recover; '' if all workers train again."""

    def goes_on() -> bool:
        return recovery_s(job.commits[around:], kill, step_s=0) is not None

    def all_back() -> bool:
        return job.newest[kill.worker].pid != pid and all(one.t > resumed for one in job.newest.values())

    if not job.wait(goes_on, timeout_s=RECOVERY_TIMEOUT_S):
        return f"no step in {RECOVERY_TIMEOUT_S:.0f} s"
    resumed = time.time()
    if not job.wait(all_back, timeout_s=RECOVERY_TIMEOUT_S):
        return f"not all workers are back {RECOVERY_TIMEOUT_S:.0f} s after the first step"
    return ""
