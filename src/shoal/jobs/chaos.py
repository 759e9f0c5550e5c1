"""`shoal chaos`: run a job under injected faults, and compare its weights with those of an undisturbed run."""

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
from shoal.events import Event, RunState
from shoal.events.state_parts import ServerSummary, WorkerSummary
from shoal.fleet.engines.make import capacity_of
from shoal.fleet.forkserver import ForkServer
from shoal.jobs import commands
from shoal.jobs.coroutines import run_steps
from shoal.jobs.resolve_auto import resolve_auto_steps
from shoal.jobs.run_executor import OnEvent, open_executor, run_to_end
from shoal.jobs.run_result import RunResult
from shoal.jobs.verify import pin_job, run_with_workers, with_workers
from shoal.jobs.worker_group import initial_workers
from shoal.plan.fault_plan import Fault, FaultKind, random_fault_plan
from shoal.spec.job import Job
from shoal.spec.receipt import Receipt
from shoal.spec.run_paths import RunPaths

STOPPED_S, RUNNING_S = 0.03, 0.01
"""Seconds that a slowed worker is stopped, and then runs, in turn. The failure detector tolerates such short stops."""
EVENT_SOURCE = "chaos"


@dataclass(frozen=True)
class ChaosResult:
    """`injected` of the `planned` faults happened. `outcome` is the result of the disturbed run. If the undisturbed run
    was stopped, `undisturbed` is None and `outcome` is its result."""

    undisturbed: Receipt | None
    outcome: RunResult
    planned: int = 0
    injected: int = 0

    @property
    def same(self) -> bool:
        calm, found = self.undisturbed, self.outcome.receipt
        if calm is None or found is None:
            return False
        return (calm.weights_sha256, calm.state_sha256) == (found.weights_sha256, found.state_sha256)


def chaos(
    job: Job,
    faults: Mapping[FaultKind, int] | Sequence[Fault],
    *,
    workers: int | None = None,
    seed: int = 0,
    against: Receipt | None = None,
    runs: Path,
    on_event: OnEvent,
    fork_server: ForkServer | None = None,
) -> ChaosResult:
    """Run the job undisturbed (or use the receipt `against`), then run it under faults. `faults` are the faults
    themselves, or the number of each kind, which are then drawn from the seed."""
    with open_executor(fork_server) as executor:
        job, _ = run_steps(resolve_auto_steps(job, executor.fork_servers))
        workers = workers or min(max(initial_workers(job, capacity_of(job.engine)), 2), job.lanes or job.batch_size)
        job = _job_for(job, faults, workers)
        if against is not None and against.job_sha256 != job.sha256():
            raise error("SH616", f"'{against.run}' is a run of another job", where="--against")
        if against is None:
            result = run_with_workers(workers, job, executor, runs=runs, on_event=on_event)
            if result.receipt is None:
                return ChaosResult(None, result)
            against = result.receipt
        if isinstance(faults, Mapping):
            faults = random_fault_plan(faults, steps=against.steps, workers=workers, seed=seed)
        with contextlib.closing(FaultInjector(faults, workers, on_event)) as injector:
            disturbed = _with_spare_restarts(job, workers, faults)
            handle = executor.submit(disturbed, runs=runs, on_event=injector.on_event)
            return ChaosResult(against, run_to_end(executor, handle), len(faults), injector.injected)


def _job_for(job: Job, faults: Mapping[FaultKind, int] | Sequence[Fault], workers: int) -> Job:
    """The job with every setting pinned that its result depends on. SH609 if faults are for servers and it has none.
    SH110 if workers run on other machines: faults are signals to processes of this one."""
    if job.engine.kind != "local":
        fix = "Disturb it on this machine: --set engine=local"
        raise error("SH110", f"faults with the engine {job.engine.kind}", where="engine", fix=fix)
    if job.sync.kind != "server" and _fault_count(faults, "kill server"):
        raise error("SH609", f"the job has no servers: its sync is {job.sync.kind}", where="--server-kills")
    with_lanes = _with_spare_lanes(job, workers + _fault_count(faults, "join"))
    return pin_job(with_lanes, max_workers=workers, purpose="chaos")


def _fault_count(faults: Mapping[FaultKind, int] | Sequence[Fault], kind: FaultKind) -> int:
    return faults.get(kind, 0) if isinstance(faults, Mapping) else sum(fault.kind == kind for fault in faults)


def _with_spare_lanes(job: Job, max_workers: int) -> Job:
    """The job with a lane for every worker that will join, if the job leaves `lanes` out."""
    if job.lanes:
        return job
    return job.model_copy(update={"lanes": min(max(job.workers.most, max_workers), job.batch_size)})


def _with_spare_restarts(job: Job, workers: int, faults: Sequence[Fault]) -> Job:
    """The job with extra restarts, so that injected faults do not use up its own."""
    deaths = sum(fault.kind in ("kill", "freeze", "kill server") for fault in faults)
    elastic = job.elastic.model_copy(update={"restarts": job.elastic.restarts + deaths})
    return with_workers(job, workers).model_copy(update={"elastic": elastic})


class FaultInjector:
    """Injects each fault when its step is reported, one at a time. Belongs to the driver's thread."""

    def __init__(self, faults: Sequence[Fault], workers: int, on_event: OnEvent) -> None:
        self.injected = 0
        self._pending = deque(faults)
        self._workers = workers
        self._on_event = on_event
        self._victims: set[int] = set()  # pids of processes that are dead or frozen, or soon will be
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def on_event(self, paths: RunPaths, event: Event, state: RunState) -> str | None:
        why = self._on_event(paths, event, state)
        if event.kind == "step" and self._pending and state.step >= self._pending[0].step:
            done = self._inject(self._pending[0], paths, state)
            if done:
                self._pending.popleft()
                self.injected += 1
                self._on_event(paths, Event("printed", time.time(), EVENT_SOURCE, state.step, {"text": done}), state)
        return why

    def close(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _in_thread(self, act: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=act, args=arguments, name="shoal-chaos", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _inject(self, fault: Fault, paths: RunPaths, state: RunState) -> str:
        """A description of the injected fault; '' if it must wait."""
        if fault.kind == "join":
            self._workers += 1
            self._in_thread(_scale_up, paths, self._workers)  # this is the driver's thread, and the driver must answer
            return f"step {state.step}: one more worker ({fault})"
        able = {_seat(one): one for one in self._candidates(fault, state)}
        if not able:
            return ""
        victim = able[fault.target_seat(list(able))]
        if not self._apply_fault(fault, victim):
            return ""
        return f"step {state.step}: {fault.kind.split()[0]} {victim.name} ({fault})"

    def _candidates(self, fault: Fault, state: RunState) -> Sequence[WorkerSummary | ServerSummary]:
        """The processes that the fault may hit now. A worker is killed or frozen only while another one trains, unless
        the run has only one. A server is killed only while as many servers as wanted are filled."""
        if fault.kind == "kill server":
            serving = [server for server in state.serving_servers if server.pid not in self._victims]
            return serving if len(serving) >= max(state.wanted_servers, 1) else []
        able = [worker for worker in state.training_workers if worker.pid not in self._victims]
        return [] if len(able) < 2 and self._workers > 1 and fault.kind != "slow" else able

    def _apply_fault(self, fault: Fault, victim: WorkerSummary | ServerSummary) -> bool:
        with _open_process(victim.pid) as process:
            if process is None:
                self._victims.add(victim.pid)
                return False
            if fault.kind == "slow":
                self._in_thread(_throttle, os.dup(process), self._stopped)
                return True
            self._victims.add(victim.pid)
            return _send_signal(process, signal.SIGSTOP if fault.kind == "freeze" else signal.SIGKILL)


def _seat(one: WorkerSummary | ServerSummary) -> int:
    return int(one.name.rpartition("-")[2])


def _scale_up(paths: RunPaths, wanted: int) -> None:
    with contextlib.suppress(ShoalError):  # the run may have ended meanwhile
        commands.scale(paths, wanted)


@contextlib.contextmanager
def _open_process(pid: int) -> Iterator[int | None]:
    """Yields a pidfd: a signal through it can never reach another process that got the same pid."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        yield handle
    finally:
        os.close(handle)


def _send_signal(process: int, number: int) -> bool:
    try:
        signal.pidfd_send_signal(process, number)
    except ProcessLookupError:
        return False
    return True


def _throttle(process: int, over: threading.Event) -> None:
    """Stop the process most of the time, until it exits or the run ends."""
    try:
        while not over.is_set() and _send_signal(process, signal.SIGSTOP):
            time.sleep(STOPPED_S)
            _send_signal(process, signal.SIGCONT)
            over.wait(RUNNING_S)
    finally:
        os.close(process)
