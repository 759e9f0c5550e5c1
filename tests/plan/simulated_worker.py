"""A worker without a process: the real loops around a strategy that only counts, one small act at a time.

`ElasticLoop` and `Loop` are those of a real worker. They run in a thread that has the turn only inside `run_stage`, and
gives it back wherever a real worker would wait; so a schedule is a function of its seed. What must hold in a worker is
checked where it could break; an `InvariantViolation` says what did not.
"""

from __future__ import annotations

import _thread
import threading
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from shoal.collectives.outcome import Committed, Discarded
from shoal.spec.job import MonitorConfig
from shoal.spec.view import View, step_of
from shoal.strategies.base import Traits
from shoal.train.activity import Activity
from shoal.train.elastic import ElasticLoop
from shoal.train.loop import Loop, TrainSchedule
from shoal.train.progress import Progress
from shoal.train.reporting import Reporter, StepStats
from shoal.train.watchers import BestMetric

if TYPE_CHECKING:
    from tests.plan.membership_simulation import MembershipSimulation, SimulatedDriver

NO_END, LOSS = 1 << 40, torch.tensor(1.0)
LOST = Discarded("a member is lost, or the view was aborted")


class InvariantViolation(AssertionError):
    pass


class ProcessEnded(BaseException):
    """Ends the thread of a worker that is gone; nothing in a worker catches it."""


def require(holds, message):
    if not holds:
        raise InvariantViolation(message)


@dataclass(eq=False)
class SimulatedGroup:
    """The members of one training view: who has come, who has laid down what, who left the others alone."""

    view: View
    workers: dict[int, SimulatedWorker]
    arrived: set[int] = field(default_factory=set)
    contributions: dict[int, dict[int, bool]] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)

    def is_broken(self):
        return bool(self.left) or not all(worker.alive for worker in self.workers.values())


@dataclass(eq=False)
class SimulatedConnection:
    """A connection between a worker and a driver."""

    worker: SimulatedWorker
    driver: SimulatedDriver
    to_driver: deque = field(default_factory=deque)
    to_worker: deque = field(default_factory=deque)
    welcomed: bool = False
    closed: bool = False
    seat: int | None = None


class Turns:
    """A thread that runs only while somebody waits for it."""

    def __init__(self, act):
        self._go, self._done = _thread.allocate_lock(), _thread.allocate_lock()
        self._go.acquire()
        self._done.acquire()
        self.ended, self._failure = False, None
        self._thread = threading.Thread(target=self._run, args=(act,), daemon=True)
        self._thread.start()

    def _run(self, act):
        self._go.acquire()
        try:
            act()
        except ProcessEnded:
            pass
        except BaseException as failure:
            self._failure = failure
        self.ended = True
        self._done.release()

    def give(self):
        """Until it pauses or ends; what it raised is raised here."""
        self._go.release()
        self._done.acquire()
        if self.ended:
            self._thread.join()
        if self._failure:
            raise self._failure

    def pause(self):
        """By the thread itself."""
        self._done.release()
        self._go.acquire()


class QuietStream:
    who = ""

    def emit(self, kind, /, *, step=None, **fields):
        """Nobody reads it."""


class SimulatedWorker:
    """`connect`, `receive` and `flush` are its control client's; `run_stage` is the training thread's next act."""

    def __init__(self, simulation: MembershipSimulation, *, managed, can_save, seat, position):
        self.simulation, self.session_seat = simulation, seat
        self.managed, self.can_save = managed, can_save
        self.alive, self.frozen, self.terminated = True, False, False
        self.stage = "building"
        self.newest_view: View | None = None
        self.group: SimulatedGroup | None = None
        self.may_be_ahead = False  # it may have followed others further than it said
        self.connection: SimulatedConnection | None = None
        self.outbox: deque = deque()
        reporter = Reporter(QuietStream())
        self.progress = Progress(
            sampler=SimpleNamespace(batch_samples=lambda step: 1),
            task=None,
            reporter=reporter,
            stats=StepStats(reporter, every_step=False),
            activity=Activity(),
            best=BestMetric(MonitorConfig()),
            has_state=position is not None,
        )
        self.strategy = CountingStrategy(self)
        self._elastic: ElasticLoop | None = None
        self._turns: Turns | None = None

    @property
    def seat(self):
        return self._elastic.seat if self._elastic else self.session_seat

    @property
    def view_number(self):
        return self._elastic._view_number if self._elastic else 0

    @property
    def position(self):
        return self.progress.position

    # ---- the control client ----

    def connect(self):
        driver = self.simulation.driver
        if driver is None or (self.connection and not self.connection.closed and self.connection.driver is driver):
            return
        self.connection = SimulatedConnection(self, driver)
        driver.connections.append(self.connection)
        training = self.stage not in ("building", "waiting")
        number = self.newest_view.number if self.newest_view else 0
        self.connection.to_driver.append(("here", self.session_seat, number, training))

    def receive(self):
        wire = self.connection
        if not wire or wire.closed or not wire.to_worker:
            return
        kind, value = wire.to_worker.popleft()
        if kind == "welcome":
            if self._elastic and value != self.session_seat:
                self._elastic.on_seat_changed(value)
            self.session_seat, wire.welcomed = value, True
            if self.stage == "waiting":
                self.report_position()
        elif self.newest_view is None or value.number > self.newest_view.number:
            self.newest_view = value
            if self._elastic:
                self._elastic.on_view(value)

    def report_position(self):
        """Where it stands. What nobody took yet waits for the next driver."""
        if self.connection and self.connection.welcomed and not self.connection.closed and self._elastic:
            self.outbox.append(("stands", self.view_number, self.position))

    def flush(self):
        wire = self.connection
        if wire and wire.welcomed and not wire.closed:
            wire.to_driver.extend(self.outbox)
            self.outbox.clear()

    # ---- what the loops see of the driver ----

    def wait(self, seat, *, after, position, saved=False, timeout_s=None):
        require(position == self.position, "it says another position than it has")
        if timeout_s == 0:
            self.report_position()
            return None
        if self.stage != "waiting" or self.simulation.happens(0.3):
            self.stage = "waiting"
            self.report_position()
        self.pause("waiting")
        view = self.newest_view
        return view if view and view.number > after and view.concerns(seat) else None

    def newer(self, number):
        return self.newest_view is not None and self.newest_view.number > number

    def leave_reason(self):
        return "terminated" if self.terminated and self.simulation.driver is None else ""

    def measure_link(self, view, seat):
        return None

    def latest(self):
        return SimpleNamespace(step=self.simulation.checkpoint)

    # ---- the training thread ----

    def run_stage(self):
        if self._turns is None:
            if not (self.connection and self.connection.welcomed):
                return
            self._start()
        self._turns.give()
        if self._turns.ended and self.alive:
            self.die()

    def _start(self):
        loop = Loop(
            TrainSchedule(NO_END, NO_END),
            strategy=self.strategy,
            progress=self.progress,
            splits={},
            store=SimpleNamespace(wait=lambda: None, latest=self.latest),
            membership=self,
            conclude=lambda model: None,
            leave_reason=self.leave_reason,
        )
        save_lock = self.simulation.save_lock if self.can_save else None
        self._elastic = ElasticLoop(loop, peers=self, seat=self.session_seat, save_lock=save_lock)
        self._turns = Turns(self._elastic.run)

    def pause(self, stage):
        """The turn goes to somebody else, and comes back or not."""
        self.stage = stage
        self._turns.pause()
        if not self.alive:
            raise ProcessEnded

    def die(self):
        """The process is gone."""
        self.alive = False
        if self.connection and not self.connection.closed:
            self.connection.to_driver.append(("lost",))

    def end_thread(self):
        """After the simulation."""
        self.alive = False
        if self._turns and not self._turns.ended:
            self._turns.give()


class CountingStrategy:
    """See Strategy: weights are a step number. Members meet in a SimulatedGroup instead of a network."""

    traits, lr, is_saved = Traits(exact=True, lockstep=True), 0.0, False

    def __init__(self, worker: SimulatedWorker):
        self._worker, self._progress, self._simulation = worker, worker.progress, worker.simulation
        self._aborted = 0
        self._source: SimulatedWorker | None = None
        self._follows = False

    def enter(self, view, seat):
        worker = self._worker
        if worker.group:
            worker.group.left.add(seat)
        group = worker.group = self._simulation.meshes[id(view)]
        while self._progress.position != view.position:
            worker.pause("catching")
            if not self._catch_up(group, seat):
                return self._leave(group, seat)
        group.arrived.add(seat)
        while True:
            worker.pause("meeting")
            here = group.arrived >= set(view.carries)
            if self._gave_up(group) or (group.is_broken() and (not here or self._simulation.happens(0.5))):
                return self._leave(group, seat)
            if here:
                break
        require(self._progress.position == view.position, "who enters a view does not hold what it starts from")
        worker.may_be_ahead = False
        return None

    def _catch_up(self, group, seat):
        """One attempt; False if there is no use in another."""
        view, source = group.view, self._source
        if source and self._follows and source.alive and self._is_on_the_way(view, source):
            self._hold(step_of(view.position))
            return True
        if view.source is None or view.source == seat:
            return False
        self._source, self._follows, holder = None, False, group.workers[view.source]
        if holder.alive and not holder.frozen and holder.group is group and holder.stage == "meeting":
            self._hold(holder.progress.step)
            return True
        gone_on = holder.view_number > view.number
        return not (self._gave_up(group) or not holder.alive or gone_on or group.left)

    def _is_on_the_way(self, view, source):
        return (self._progress.position or 0) < view.position <= (source.position or 0)

    def _hold(self, step):
        self._progress.step, self._progress.has_state = step, True

    def _gave_up(self, group):
        return self._aborted >= group.view.number

    def _leave(self, group, seat):
        group.left.add(seat)
        return LOST

    def follow(self, view, seat):
        worker, source = self._worker, self._simulation.worker_at(view.source)
        self._source, self._follows = source, False
        while True:
            worker.pause("following")
            if source is None or not source.alive:
                self._source = None
                return
            if not self._follows:
                if source.stage == "training" and not source.strategy.contributes:
                    self._hold(source.progress.step)
                    self._follows = True
            elif self._progress.step < source.progress.step:
                self._hold(self._progress.step + 1)
                worker.may_be_ahead = True
            else:
                yield True
                continue
            yield False

    @property
    def contributes(self):
        """Is it in the midst of a step?"""
        worker = self._worker
        return worker.seat in worker.group.contributions.get(self._progress.step, {})

    def run_step(self, must_halt):
        worker, group, step = self._worker, self._worker.group, self._progress.step
        seat, sums = worker.seat, group.contributions.setdefault(step, {})
        worker.pause("training")
        if self._gave_up(group) or (group.is_broken() and self._simulation.happens(0.5)):
            return self._leave(group, seat)
        sums[seat] = must_halt()
        while True:
            worker.pause("training")
            fails = self._gave_up(group) or group.is_broken()
            if sums.keys() == group.view.carries.keys() and not (fails and self._simulation.happens(0.3)):
                break
            if fails:
                return self._leave(group, seat)
        committed = Committed(LOSS, halt=any(sums.values()))
        self._progress.record_commit(committed, step=step + 1, lr=0.0)
        self._simulation.commits += 1
        return committed

    def leave_view(self):
        return None

    def save(self, *, force=False):
        if self._worker.group.view.saver == self._worker.seat and self._simulation.happens(0.2):
            self.save_alone()

    def save_alone(self):
        self._simulation.checkpoint = max(self._simulation.checkpoint, self._progress.step)

    def restore(self):
        self._worker.pause("loading")
        self._hold(self._simulation.checkpoint)
        return self._progress.step or None

    def hand_over(self, given_up):
        """Others hold what it holds."""

    def abort(self, view):
        self._aborted = max(self._aborted, view)
