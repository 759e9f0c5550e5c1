"""A run under faults, and whether its weights are those of the undisturbed one."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ShoalError, error
from shoal.events import Event, Picture
from shoal.events.picture import Server, Worker
from shoal.fleet.engines.local import Nursery
from shoal.jobs import drive, wishes
from shoal.jobs.drive import Look
from shoal.jobs.helm import first_number
from shoal.jobs.run import Outcome, borrowed
from shoal.jobs.settling import settle
from shoal.jobs.verify import fixed, run_with, with_workers
from shoal.plan.faults import Fault, Kind, plan
from shoal.spec.job import Job
from shoal.spec.paths import RunPaths
from shoal.spec.receipt import Receipt

STOPPED_S, RUNNING_S = 0.03, 0.01
"""How a slowed worker is held: far shorter than what is taken for frozen."""
WHO = "chaos"


@dataclass(frozen=True)
class Verdict:
    """`happened` faults of `planned`; `outcome` is that of the disturbed run, or of the undisturbed one (`calm` is
    None then) if somebody stopped that."""

    calm: Receipt | None
    outcome: Outcome
    planned: int = 0
    happened: int = 0

    @property
    def same(self) -> bool:
        calm, found = self.calm, self.outcome.receipt
        if calm is None or found is None:
            return False
        return (calm.weights_sha256, calm.state_sha256) == (found.weights_sha256, found.state_sha256)


def chaos(
    job: Job,
    faults: Mapping[Kind, int] | Sequence[Fault],
    *,
    workers: int | None = None,
    seed: int = 0,
    against: Receipt | None = None,
    runs: Path,
    look: Look,
    nursery: Nursery | None = None,
) -> Verdict:
    """Run the job undisturbed (or take the receipt `against`), then under faults: these, or so many by the seed."""
    job, _ = settle(job, nursery=nursery)
    workers = workers or min(max(first_number(job), 2), job.lanes or job.batch_size)
    if job.sync.kind != "server" and _number(faults, "kill server"):
        raise error("SH609", f"the job has no servers: its sync is {job.sync.kind}", where="--server-kills")
    job = fixed(_with_room(job, workers + _number(faults, "join")), most=workers, purpose="chaos")
    if against is not None and against.job_sha256 != job.sha256():
        raise error("SH616", f"'{against.run}' is a run of another job", where="--against")
    with borrowed(nursery, job) as mine:
        if against is None:
            outcome = run_with(workers, job, runs=runs, look=look, nursery=mine)
            if outcome.receipt is None:
                return Verdict(None, outcome)
            against = outcome.receipt
        if isinstance(faults, Mapping):
            faults = plan(faults, steps=against.steps, workers=workers, seed=seed)
        with contextlib.closing(Chaos(faults, workers, look)) as happening:
            disturbed = drive.run(_hardened(job, workers, faults), runs=runs, look=happening.look, nursery=mine)
        assert isinstance(disturbed, Outcome)
        return Verdict(against, disturbed, len(faults), happening.happened)


def _number(faults: Mapping[Kind, int] | Sequence[Fault], kind: Kind) -> int:
    return faults.get(kind, 0) if isinstance(faults, Mapping) else sum(fault.kind == kind for fault in faults)


def _with_room(job: Job, most: int) -> Job:
    """Lanes for those who will join, where the job leaves their number open."""
    if job.lanes:
        return job
    return job.model_copy(update={"lanes": min(max(job.workers.most, most), job.batch_size)})


def _hardened(job: Job, workers: int, faults: Sequence[Fault]) -> Job:
    """Faults that were asked for do not use up the job's own restarts."""
    deaths = sum(fault.kind in ("kill", "freeze", "kill server") for fault in faults)
    engine = job.engine.model_copy(update={"restarts": job.engine.restarts + deaths})
    return with_workers(job, workers).model_copy(update={"engine": engine})


class Chaos:
    """Lets each fault happen when its step is shown, one at a time. Belongs to the thread that drives."""

    def __init__(self, faults: Sequence[Fault], workers: int, look: Look) -> None:
        self.happened = 0
        self._waiting = deque(faults)
        self._workers = workers
        self._look = look
        self._hit: set[int] = set()  # processes that are dead or frozen, or soon will be
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def look(self, paths: RunPaths, event: Event, picture: Picture) -> None:
        self._look(paths, event, picture)
        if event.kind == "step" and self._waiting and picture.step >= self._waiting[0].step:
            done = self._happen(self._waiting[0], paths, picture)
            if done:
                self._waiting.popleft()
                self.happened += 1
                self._look(paths, Event("printed", time.time(), WHO, picture.step, {"text": done}), picture)

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _apart(self, act: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=act, args=arguments, name="shoal-chaos", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _happen(self, fault: Fault, paths: RunPaths, picture: Picture) -> str:
        """What was done; '' if it has to wait."""
        if fault.kind == "join":
            self._workers += 1
            self._apart(_scaled, paths, self._workers)  # the driver, whose thread this is, has to answer
            return f"step {picture.step}: one more worker ({fault})"
        able = {_seat(one): one for one in self._able(fault, picture)}
        if not able:
            return ""
        victim = able[fault.chosen(list(able))]
        if not self._harm(fault, victim):
            return ""
        return f"step {picture.step}: {fault.kind.split()[0]} {victim.name} ({fault})"

    def _able(self, fault: Fault, picture: Picture) -> Sequence[Worker | Server]:
        """Who may be harmed now. Somebody must be left who holds what was learnt: of servers, all that are
        wanted must have been filled."""
        if fault.kind == "kill server":
            serving = [server for server in picture.serving if server.pid not in self._hit]
            return serving if len(serving) >= max(picture.wanted_servers, 1) else []
        able = [worker for worker in picture.training if worker.pid not in self._hit]
        return [] if len(able) < 2 and self._workers > 1 and fault.kind != "slow" else able

    def _harm(self, fault: Fault, victim: Worker | Server) -> bool:
        with _process(victim.pid) as process:
            if process is None:
                self._hit.add(victim.pid)
                return False
            if fault.kind == "slow":
                self._apart(_slow, os.dup(process), self._over)
                return True
            self._hit.add(victim.pid)
            return _send(process, signal.SIGSTOP if fault.kind == "freeze" else signal.SIGKILL)


def _seat(one: Worker | Server) -> int:
    return int(one.name.rpartition("-")[2])


def _scaled(paths: RunPaths, wanted: int) -> None:
    with contextlib.suppress(ShoalError):  # the run is over meanwhile
        wishes.scale(paths, wanted)


@contextlib.contextmanager
def _process(pid: int) -> Iterator[int | None]:
    """A handle on a process that never becomes one on another."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield handle
    finally:
        os.close(handle)


def _send(process: int, number: int) -> bool:
    try:
        signal.pidfd_send_signal(process, number)
    except ProcessLookupError:
        return False
    return True


def _slow(process: int, over: threading.Event) -> None:
    """Held for most of the time, until it is gone or the run is over."""
    try:
        while not over.is_set() and _send(process, signal.SIGSTOP):
            time.sleep(STOPPED_S)
            _send(process, signal.SIGCONT)
            over.wait(RUNNING_S)
    finally:
        os.close(process)
