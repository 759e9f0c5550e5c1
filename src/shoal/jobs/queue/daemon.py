"""The daemon of a queue: runs its jobs in one process, and divides the machine between them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from shoal.errors import ShoalError, describe_exception, error
from shoal.events import Event, RunState
from shoal.fleet.engines.host_use import UNREACHABLE
from shoal.jobs import run_dir
from shoal.jobs.compression.shrink_legs import last_leg
from shoal.jobs.coroutines import TICK_S
from shoal.jobs.queue.entry_kinds import KINDS, Assignment, Watch
from shoal.jobs.queue.queue_store import QueueStore
from shoal.jobs.run_executor import RunExecutor, RunHandle
from shoal.jobs.run_result import RunResult
from shoal.plan.queueing import order, transitions
from shoal.plan.queueing.entry import QueueEntry
from shoal.plan.queueing.lease import BEAT_S, Lease
from shoal.plan.queueing.shares import CoreCapacity, JobFacts, Share, SharePolicy
from shoal.plan.queueing.speed import Measured, SpeedMeter, known_speeds, speeds_with_plan
from shoal.plan.queueing.work import CompressWork, Work
from shoal.spec.job import Job
from shoal.spec.run_paths import RunPaths

DECIDE_S = 5.0
"""Seconds after which shares are decided again although nothing happened: speeds become known."""
IDLE_TICK_S = 0.2
PUT_BACK = {
    "terminated": "the daemon was ended",
    "interrupted": "the daemon was ended",
    "down": "the daemon was ended by `shoal down`",
    "preempted": "others had to go first",
}
"""Reasons for which the daemon itself stops a run. The next turn resumes it."""
FINAL = ("SH606", "SH614", "SH636", "SH660", "SH662", "SH664", "SH665", "SH668", "SH669")
"""Errors of the work itself, among those of runs: another attempt would end in the same way."""
TRIED_FIRST = "a job that ended early before is tried first, or it is such a job and the others come first"
Settle = Callable[[QueueEntry], QueueEntry]
Prepare = Callable[[Job], Job]


class ClusterPool(Protocol):
    """Where jobs run."""

    def capacity(self) -> CoreCapacity:
        """The machines of now, without quotas."""

    def has_changed(self) -> bool:
        """Whether machines came or went since the last call."""

    def place(self, wanted: Mapping[str, Sequence[str]]) -> None:
        """By run: the machines of its workers, as the policy wants them."""


@dataclass
class Attempt:
    """One start of a job by this daemon. `run_state` is that of its run, for the steps that are left. `first_steps` is
    how far its run, or each of its folds, was before. `progressed`: it has made a step beyond that."""

    handle: RunHandle
    began_s: float
    meter: SpeedMeter = field(default_factory=SpeedMeter)
    run_state: RunState | None = None
    first_steps: dict[RunPaths, int] = field(default_factory=dict)
    progressed: bool = False

    def progress(self) -> None:
        self.progressed = True


class QueueDaemon:
    """Belongs to one thread. Call `tick` until it returns True. Holds the lease: see `daemon_lock`.

    `prepare` may change how a job is run (its engine), not what it computes.
    """

    def __init__(
        self,
        store: QueueStore,
        executor: RunExecutor,
        lease: Lease,
        *,
        policy: SharePolicy,
        cluster: ClusterPool,
        idle_s: float | None = None,
        prepare: Prepare = lambda job: job,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._executor = executor
        self._epoch = lease.epoch
        self._policy = policy
        self._cluster = cluster
        self._counts_seats = cluster.capacity().seats
        self._idle_s = idle_s
        self._prepare = prepare
        self._clock = clock
        self._file_id = os.stat(store.paths.file).st_ino
        self._entries: dict[int, QueueEntry] = {}
        self._last_change = 0
        self._attempts: dict[int, Attempt] = {}
        self._seen_s: dict[int, float] = {}
        self._served_s: dict[int, float] = {}
        self._left: dict[int, float | None] = {}
        self._earlier_speeds: dict[str, dict[int, Measured]] = {}
        self._planned_speeds: dict[str, dict[int, float]] = {}
        self._stopping = ""
        self._next_beat_s = self._next_decision_s = 0.0
        self._busy_at_s = clock()

    def start(self) -> None:
        """Take stock: jobs whose daemon died wait to be resumed, or are held."""
        self._store.check()
        self._refresh()
        for entry in list(self._entries.values()):
            if entry.state == "running":
                self._apply(entry.id, partial(transitions.lose_driver, new_epoch=self._epoch))

    def stop(self, why: str) -> None:
        """Save and stop all runs; they wait for the next daemon."""
        self._stopping = self._stopping or why

    def tick(self) -> bool:
        """Advance everything. Returns True once the daemon has given the lease back: nothing runs any more."""
        now_s = self._clock()
        self._beat(now_s)
        if self._store.has_changed():
            self._planned_speeds.clear()
            self._refresh()
            self._next_decision_s = now_s
        if self._cluster.has_changed():
            self._next_decision_s = now_s
        self._settle_all()
        self._prove(now_s)
        self._stop_unwanted()
        if self._stopping and not self._attempts:
            return self._store.release_lease_if_idle(self._epoch, is_idle=lambda: True)
        if not self._stopping and now_s >= self._next_decision_s:
            self._next_decision_s = now_s + DECIDE_S
            self._decide(now_s)
        if self._is_idle(now_s) and self._store.release_lease_if_idle(self._epoch, is_idle=self._has_nothing_to_do):
            return True
        self._executor.tick(TICK_S if self._attempts else IDLE_TICK_S)
        return False

    # ---- facts ----

    def _refresh(self) -> None:
        """Read what changed in the queue."""
        for entry in self._store.entries(since_change=self._last_change):
            self._remember(entry)

    def _remember(self, entry: QueueEntry) -> None:
        self._entries[entry.id] = entry.in_seats() if self._counts_seats else entry
        self._last_change = max(self._last_change, entry.change)

    def _apply(self, number: int, change: Settle) -> QueueEntry:
        entry = self._store.apply(number, change, epoch=self._epoch)
        self._refresh()  # also the entries that come after it
        return entry

    def _beat(self, now_s: float) -> None:
        if now_s < self._next_beat_s:
            return
        self._next_beat_s = now_s + BEAT_S
        lease = self._store.change_lease(lambda old: old.renewed(), epoch=self._epoch)
        if lease.stop_requested:
            self.stop("down")
        try:
            present = os.stat(self._store.paths.file).st_ino
        except OSError:
            present = 0
        if present != self._file_id:
            raise error("SH642", "the queue file was removed or replaced", where=str(self._store.paths.file))

    def _is_idle(self, now_s: float) -> bool:
        if self._attempts or any(entry.state == "waiting" for entry in self._entries.values()):
            self._busy_at_s = now_s
        return self._idle_s is not None and now_s - self._busy_at_s >= self._idle_s

    def _has_nothing_to_do(self) -> bool:
        self._refresh()
        return not any(entry.state in ("waiting", "running") for entry in self._entries.values())

    def _prove(self, now_s: float) -> None:
        """Attempts that have made a new step or outlived the first seconds count as good."""
        for number, attempt in self._attempts.items():
            is_good = attempt.progressed or now_s - attempt.began_s >= transitions.PROVEN_S
            if is_good and not self._entries[number].proven:
                self._apply(number, partial(transitions.prove, epoch=self._epoch))
                self._next_decision_s = now_s  # another job that ended early may start now

    # ---- the end of attempts ----

    def _settle_all(self) -> None:
        for number, attempt in list(self._attempts.items()):
            if attempt.handle.done:
                self._prove(self._clock())
                del self._attempts[number]
                self._keep_speeds(number, attempt)
                why = waits_for_hosts(attempt.handle, self._cluster.capacity().lost)
                waits = partial(transitions.put_back, epoch=self._epoch, why=why)
                self._apply(number, waits if why else settle(attempt.handle, epoch=self._epoch))
                self._served_s[number] = self._served_s.get(number, 0.0) + self._clock() - attempt.began_s
                self._left[number] = _steps_left(attempt.run_state)
                self._next_decision_s = self._clock()

    def _stop_unwanted(self) -> None:
        for number, attempt in self._attempts.items():
            if self._entries[number].cancel_requested:
                attempt.handle.stop("cancelled")
            elif self._stopping:
                attempt.handle.stop(self._stopping)

    def _keep_speeds(self, number: int, attempt: Attempt) -> None:
        key = _speed_key(self._entries[number])
        self._store.add_speeds(key, attempt.meter.by_workers)
        self._earlier_speeds.pop(key, None)

    # ---- decisions ----

    def _decide(self, now_s: float) -> None:
        running = [self._entries[number] for number in self._attempts]
        ready = order.runnable(self._entries)
        cluster = replace(self._cluster.capacity(), quotas=self._store.quotas())
        window = order.window(ready, cores=cluster.cores, quotas=cluster.quotas)
        facts = {entry.id: self._facts(entry, now_s) for entry in [*running, *window]}
        shares = self._policy.divide(now_s, running, window, cluster=cluster, facts=facts)
        for entry in running:
            self._adjust(entry, shares.get(entry.id))
        for entry in window:
            if (share := shares.get(entry.id)) and share.workers and self._may_start(entry, ready):
                self._start(entry, share, ready)
        runs = {number: self._entries[number].run for number in self._attempts}
        self._cluster.place({run: shares[number].nodes for number, run in runs.items() if number in shares})
        self._say_why([*running, *window], shares)

    def _say_why(self, entries: list[QueueEntry], shares: Mapping[int, Share]) -> None:
        said = {}
        for entry in entries:
            if share := shares.get(entry.id):
                blocked = share.workers and entry.id not in self._attempts
                said[entry.id] = TRIED_FIRST if blocked else share.why
        present = self._entries
        changed = {
            n: why for n, why in said.items() if why != present[n].reason and present[n].state in ("waiting", "running")
        }
        if changed:
            self._store.set_reasons(changed, epoch=self._epoch)
            self._refresh()

    def _facts(self, entry: QueueEntry, now_s: float) -> JobFacts:
        attempt = self._attempts.get(entry.id)
        turn_s = now_s - attempt.began_s if attempt else 0.0
        return JobFacts(
            waiting_since_s=self._seen_s.setdefault(entry.id, now_s),
            served_s=self._served_s.get(entry.id, 0.0) + turn_s,
            turn_s=turn_s,
            speeds=self._speeds(entry),
            remaining=self._remaining(entry, attempt),
        )

    def _remaining(self, entry: QueueEntry, attempt: Attempt | None) -> float | None:
        """Steps that are left. Of a run that has not begun: those that the job file declares."""
        left = _steps_left(attempt.run_state) if attempt else self._left.get(entry.id)
        return left if left is not None else float(entry.needs.steps) or None

    def _speeds(self, entry: QueueEntry) -> dict[int, float]:
        """Steps per second by workers: as planned, of earlier jobs like this one, of those that run, and its own.

        Trials of a search need nothing of each other: so many workers, so many times the speed."""
        if entry.kind == "search":
            return {workers: float(workers) for workers in (entry.needs.least, entry.needs.most)}
        key = _speed_key(entry)
        if key not in self._earlier_speeds:
            self._earlier_speeds[key] = self._store.speeds(key)
        found = known_speeds(self._earlier_speeds[key])
        for number, attempt in sorted(self._attempts.items(), key=lambda one: one[0] == entry.id):  # its own is last
            if _speed_key(self._entries[number]) == key:
                found |= attempt.meter.speeds()
        if key not in self._planned_speeds:
            self._planned_speeds[key] = self._store.planned_speeds(key)
        return speeds_with_plan(found, self._planned_speeds[key])

    def _adjust(self, entry: QueueEntry, share: Share | None) -> None:
        handle = self._attempts[entry.id].handle
        if share is None or not share.workers:
            handle.stop("preempted")
        elif share.workers != entry.workers and not entry.needs.fixed:
            handle.scale(share.workers)
            self._apply(entry.id, partial(transitions.resize, epoch=self._epoch, workers=share.workers, why=share.why))

    def _may_start(self, entry: QueueEntry, ready: list[QueueEntry]) -> bool:
        running = [self._entries[number] for number in self._attempts]
        return order.may_start(entry, running=running, ready=[self._entries[one.id] for one in ready])

    def _start(self, entry: QueueEntry, share: Share, ready: list[QueueEntry]) -> None:
        """Claim the job, then start it. Its directory is known to the queue before there is a run in it: whoever is
        killed in between leaves at most an empty directory."""
        runs = self._store.paths.runs
        paths = RunPaths.at(runs / entry.run) if entry.run else run_dir.reserve(entry.name, runs)
        try:
            self._apply(entry.id, partial(transitions.claim, epoch=self._epoch, run=paths.name))
        except transitions.WrongStateError:  # a user has just cancelled it
            if not entry.run:
                paths.root.rmdir()
            return
        for number in order.overtaken_by(entry, ready):
            self._apply(number, lambda one: one.model_copy(update={"overtaken": one.overtaken + 1}))
        if paths.job.is_file() and (ended := KINDS[entry.kind].ended(paths)):  # a daemon died before it told the queue
            self._apply(entry.id, _settle_result(ended, self._epoch))
            return
        try:
            attempt = self._begin(entry, paths)
        except ShoalError as failure:  # its job cannot be read
            self._apply(entry.id, settle_error(failure, epoch=self._epoch))
            return
        attempt.handle.scale(share.workers)
        self._attempts[entry.id] = attempt
        self._apply(entry.id, partial(transitions.resize, epoch=self._epoch, workers=share.workers, why=share.why))

    def _begin(self, entry: QueueEntry, paths: RunPaths) -> Attempt:
        """Start the work in its reserved directory, or go on with what is there."""
        attempt = Attempt(RunHandle(), self._clock())
        given = Assignment(self._work(entry), paths, lambda: self._prepare(self._store.job(entry.id)))
        watch = Watch(partial(self._watch, attempt), attempt.progress)
        attempt.handle = KINDS[entry.kind].begin(self._executor, given, watch)
        return attempt

    def _work(self, entry: QueueEntry) -> Work:
        """What the entry asks for. A compression of another job's model learns in which run that is."""
        work = self._store.work(entry.id)
        if isinstance(work, CompressWork) and work.of:
            run = last_leg(RunPaths.at(self._store.paths.runs / self._store.get(work.of).run))
            return work.model_copy(update={"run": str(run.root)})
        return work

    def _watch(self, attempt: Attempt, paths: RunPaths, event: Event, state: RunState) -> None:
        attempt.progressed |= state.step > attempt.first_steps.setdefault(paths, state.step)
        if paths.parent_run is not paths:
            return  # folds are measured by nobody
        attempt.run_state = state
        if event.kind == "view" and event.get("carries"):
            attempt.meter.change_view(len(event["carries"]))
        elif event.kind == "step":
            known = len(attempt.meter.speeds())
            attempt.meter.reach_step(state.step, self._clock())
            if len(attempt.meter.speeds()) > known:  # the policy may give it more workers now
                self._next_decision_s = self._clock()


def _steps_left(state: RunState | None) -> float | None:
    return float(state.steps_total - state.step) if state and state.steps_total else None


def _speed_key(entry: QueueEntry) -> str:
    return entry.needs.speed_key or entry.sha256


def waits_for_hosts(handle: RunHandle, lost: Sequence[str]) -> str:
    """Why an attempt ended, if the reason is a host of the cluster that cannot be reached: no fault of the job, and the
    next attempt does not wait for it. '' if it ended otherwise."""
    try:
        failure = handle.result().deciding.error
    except ShoalError as raised:
        failure = raised
    except (Exception, CancelledError):
        return ""
    unreachable = failure is not None and failure.code == UNREACHABLE
    return f"it waits for a host: {failure.message}" if failure and unreachable and lost else ""


def settle(handle: RunHandle, *, epoch: int) -> Settle:
    """What the end of an attempt means for its entry."""
    try:
        result = handle.result()
    except CancelledError:  # stopped while it was planned
        return partial(transitions.put_back, epoch=epoch, why="it had not begun")
    except ShoalError as failure:
        return settle_error(failure, epoch=epoch)
    except Exception as failure:
        return partial(transitions.fail, epoch=epoch, why=f"a bug in Shoal: {describe_exception(failure)}")
    return _settle_result(result, epoch)


def _settle_result(result: RunResult, epoch: int) -> Settle:
    failure = result.deciding.error
    if result.status == "finished":
        return partial(transitions.finish, epoch=epoch)
    if failure is not None:
        return settle_error(failure, epoch=epoch)
    if result.status in PUT_BACK:
        return partial(transitions.put_back, epoch=epoch, why=PUT_BACK[result.status])
    return partial(transitions.stop, epoch=epoch, why=f"its run was {result.status}")


def settle_error(failure: ShoalError, *, epoch: int) -> Settle:
    """Faults of the job, its data and its code come again with every attempt. Those of processes and disks may not."""
    why = f"{failure.code}: {failure.message}"
    passing = failure.code in ("SH503", "SH510") or (failure.code.startswith("SH6") and failure.code not in FINAL)
    return partial(transitions.die if passing else transitions.fail, epoch=epoch, why=why)
