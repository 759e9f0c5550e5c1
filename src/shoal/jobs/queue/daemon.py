"""The daemon of a queue: runs its jobs in one process, and divides the machine between them."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Protocol

from shoal.errors import ShoalError, error
from shoal.events import Event, RunState
from shoal.jobs import run_dir
from shoal.jobs.compression.shrink_legs import last_leg
from shoal.jobs.coroutines import TICK_S
from shoal.jobs.queue.attempt_end import Settle, settle, settle_error, settle_result
from shoal.jobs.queue.entry_kinds import KINDS, Assignment, Watch
from shoal.jobs.queue.queue_store import QueueStore
from shoal.jobs.run_executor import RunExecutor, RunHandle
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
TRIED_FIRST = "a job that ended early before is tried first, or it is such a job and the others come first"
MAX_MISFITS_TOLD = 100
"""So many jobs are told that they do not fit any machine: the file is written for each."""
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
        self._ended_s: dict[int, float] = {}
        self._began_s = self._busy_at_s = clock()

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

    def _apply_all(self, changes: Mapping[int, Settle]) -> None:
        self._store.apply_all(changes, epoch=self._epoch)
        self._refresh()

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
        """Beside attempts that have made a new step, or outlived the first seconds, others may start."""
        for number, attempt in self._attempts.items():
            entry = self._entries[number]
            if attempt.progressed and (entry.fruitless or not entry.proven):
                self._apply(number, partial(transitions.progress, epoch=self._epoch))
            elif now_s - attempt.began_s >= transitions.PROVEN_S and not entry.proven:
                self._apply(number, partial(transitions.prove, epoch=self._epoch))
            if self._entries[number].proven and not entry.proven:
                self._next_decision_s = now_s  # another job that ended early may start now

    # ---- the end of attempts ----

    def _settle_all(self) -> None:
        for number, attempt in list(self._attempts.items()):
            if attempt.handle.done:
                self._prove(self._clock())
                del self._attempts[number]
                self._keep_speeds(number, attempt)
                lost = self._cluster.capacity().lost
                self._apply(number, settle(attempt.handle, epoch=self._epoch, lost=lost))
                self._served_s[number] = self._served_s.get(number, 0.0) + self._clock() - attempt.began_s
                self._left[number] = _steps_left(attempt.run_state)
                self._ended_s[number] = self._clock()
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
        ready = [entry for entry in order.runnable(self._entries) if not self._pauses(entry, now_s)]
        cluster = replace(self._cluster.capacity(), quotas=self._store.quotas())
        found = order.window(ready, cluster)
        window = found.entries
        facts = {entry.id: self._facts(entry, now_s) for entry in [*running, *window]}
        shares = self._policy.divide(now_s, running, window, cluster=cluster, facts=facts)
        for entry in running:
            self._adjust(entry, shares.get(entry.id))
        for entry in window:
            if (share := shares.get(entry.id)) and share.workers and self._may_start(entry, ready):
                self._start(entry, share)
        if started := [entry for entry in window if self._entries[entry.id].attempts > entry.attempts]:
            able = order.only_want_room(ready, running=running, quotas=cluster.quotas, misfits=found.misfits)
            could_start = able - {number for number, share in shares.items() if share.workers}
            passed = Counter(n for one in started for n in order.overtaken_by(one, ready, could_start))
            self._apply_all({n: partial(transitions.overtake, times=times) for n, times in passed.items()})
        runs = {number: self._entries[number].run for number in self._attempts}
        self._cluster.place({run: shares[number].nodes for number, run in runs.items() if number in shares})
        self._say_why(
            {entry.id: shares[entry.id] for entry in [*running, *window] if entry.id in shares}, found.misfits
        )

    def _pauses(self, entry: QueueEntry, now_s: float) -> bool:
        return now_s < self._ended_s.get(entry.id, self._began_s) + transitions.pause_s(entry)

    def _say_why(self, shares: Mapping[int, Share], misfits: Mapping[int, str]) -> None:
        said = dict(islice(misfits.items(), MAX_MISFITS_TOLD))
        for number, share in shares.items():
            blocked = share.workers and number not in self._attempts
            said[number] = TRIED_FIRST if blocked else share.why
        present = self._entries
        changed = {
            n: why for n, why in said.items() if why != present[n].reason and present[n].state in ("waiting", "running")
        }
        if changed:
            self._apply_all({number: partial(transitions.say, why=why) for number, why in changed.items()})

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

    def _start(self, entry: QueueEntry, share: Share) -> None:
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
        if paths.job.is_file() and (ended := KINDS[entry.kind].ended(paths)):  # a daemon died before it told the queue
            self._apply(entry.id, settle_result(ended, self._epoch))
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
