"""A worker without a process: it keeps to the protocol of `train.elastic` and `train.loop`, one small act at a time.

What must hold in a worker is checked where it could break; a `Broken` says what did not.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal.spec.view import View

if TYPE_CHECKING:
    from tests.plan.membership_simulation import MembershipSimulation, SimulatedDriver


class InvariantViolation(AssertionError):
    pass


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


@dataclass(eq=False)
class SimulatedWorker:
    """Follows the protocol: its thread waits, catches up, meets, trains, follows, loads; its control client listens."""

    simulation: MembershipSimulation
    local: bool
    seat: int | None
    position: int | None
    alive: bool = True
    frozen: bool = False
    terminated: bool = False
    stage: str = "building"
    number: int = 0
    newest_view: View | None = None
    aborted: int = 0
    moved_to: int | None = None
    group: SimulatedGroup | None = None
    contributed: bool = False
    source: SimulatedWorker | None = None
    has_state: bool = False
    may_be_ahead: bool = False  # it may have followed others further than it said
    connection: SimulatedConnection | None = None
    outbox: deque = field(default_factory=deque)

    # ---- the control client ----

    def connect(self):
        driver = self.simulation.driver
        if driver is None or (self.connection and not self.connection.closed and self.connection.driver is driver):
            return
        self.connection = SimulatedConnection(self, driver)
        driver.connections.append(self.connection)
        training = self.stage not in ("building", "waiting")
        self.connection.to_driver.append(
            ("here", self.moved_to or self.seat, self.newest_view.number if self.newest_view else 0, training)
        )

    def receive(self):
        wire = self.connection
        if not wire or wire.closed or not wire.to_worker:
            return
        kind, value = wire.to_worker.popleft()
        if kind == "welcome":
            if self.seat is None:
                self.seat = value
            elif value != self.seat:
                self.moved_to, self.aborted = value, max(self.aborted, self.number)
            wire.welcomed = True
            if self.stage == "waiting":
                self.report_position()
        elif self.newest_view is None or value.number > self.newest_view.number:
            self.newest_view = value
            if value.halt == "now":
                self.aborted = max(self.aborted, value.number - 1)

    def report_position(self):
        """Where it stands. What nobody took yet waits for the next driver."""
        if self.connection and self.connection.welcomed and not self.connection.closed:
            self.outbox.append(("stands", self.number, self.position))

    def flush(self):
        wire = self.connection
        if wire and wire.welcomed and not wire.closed:
            wire.to_driver.extend(self.outbox)
            self.outbox.clear()

    # ---- the thread ----

    def run_stage(self):
        getattr(self, f"_{self.stage}")()

    def _wait(self):
        self.stage, self.contributed = "waiting", False
        self.report_position()

    def _leave_group(self):
        self.group.left.add(self.seat)
        self._wait()

    def _building(self):
        if self.connection and self.connection.welcomed:
            self._wait()

    def _waiting(self):
        if self.moved_to is not None:
            self.seat, self.moved_to = self.moved_to, None
        view = self.newest_view
        if view and view.number > self.number and view.concerns(self.seat):
            self._adopt_view(view)
        elif self.terminated and self.simulation.driver is None:
            self.die()
        elif self.simulation.happens(0.3):
            self.report_position()

    def _adopt_view(self, view):
        self.number = view.number
        if self.group:
            self.group.left.add(self.seat)
        if self.seat in view.leave or view.stop:
            if view.saver == self.seat:
                self.simulation.checkpoint = max(self.simulation.checkpoint, self.position)
            self.die()
        elif view.loads == self.seat:
            self.stage = "loading"
        elif self.seat in view.followers:
            self.stage, self.has_state = "following", False
            self.source = self.simulation.worker_at(view.source)
        elif self.seat in view.carries:
            self.group, self.contributed = self.simulation.meshes[id(view)], False
            self.stage = "catching"
        else:
            self._wait()

    def _loading(self):
        self.position = self.simulation.checkpoint
        self._wait()

    def _following(self):
        source = self.source
        if source is None or not source.alive:
            self.source = None
            self._wait()
        elif self.newest_view.number > self.number:
            self._wait()
        elif not self.has_state:
            if source.stage == "training" and not source.contributed:
                self.position, self.has_state = source.position, True
        elif self.position < source.position:
            self.position += 1
            self.may_be_ahead = True
        else:
            self.report_position()

    def _catching(self):
        view, source = self.group.view, self.source
        if self.position == view.position:
            self._enter_group()
        elif source and self.has_state and source.alive and (self.position or 0) < view.position <= source.position:
            self.position = view.position
        elif view.source is None or view.source == self.seat:
            self._leave_group()
        else:
            self.source, self.has_state, holder = None, False, self.group.workers[view.source]
            if holder.alive and not holder.frozen and holder.group is self.group and holder.stage == "meeting":
                self.position = holder.position
            elif self.aborted >= view.number or not holder.alive or holder.number > view.number or self.group.left:
                self._leave_group()

    def _enter_group(self):
        self.group.arrived.add(self.seat)
        self.stage = "meeting"

    def _meeting(self):
        mesh = self.group
        given_up = self.aborted >= mesh.view.number
        all_here = mesh.arrived >= set(mesh.view.carries)
        if given_up or (mesh.is_broken() and (not all_here or self.simulation.happens(0.5))):
            self._leave_group()
        elif all_here:
            require(self.position == mesh.view.position, "who enters a view does not hold what it starts from")
            require(not self.contributed, "a step was begun before the view")
            self.stage, self.may_be_ahead = "training", False

    def _training(self):
        mesh, alone = self.group, len(self.group.view.carries) == 1
        given_up = self.aborted >= mesh.view.number
        laid = mesh.contributions.setdefault(self.position, {})
        if not self.contributed:
            halt = self.newest_view.number > self.number or (self.terminated and self.simulation.driver is None)
            if given_up or (mesh.is_broken() and self.simulation.happens(0.5)):
                self._leave_group()
            elif halt and alone:
                self._wait()
            else:
                laid[self.seat], self.contributed = halt, True
        elif laid.keys() == mesh.view.carries.keys() and not (
            (given_up or mesh.is_broken()) and self.simulation.happens(0.3)
        ):
            self._commit(any(laid.values()))
        elif given_up or mesh.is_broken():
            self._leave_group()

    def _commit(self, halt):
        self.position += 1
        self.contributed = False
        self.simulation.commits += 1
        if self.group.view.saver == self.seat and self.simulation.happens(0.2):
            self.simulation.checkpoint = max(self.simulation.checkpoint, self.position)
        if halt:
            self._wait()

    def die(self):
        """The process is gone."""
        self.alive = False
        if self.connection and not self.connection.closed:
            self.connection.to_driver.append(("lost",))
