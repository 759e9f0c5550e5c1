"""A worker without a process: it keeps to the protocol of `train.voyage` and `train.loop`, one small act at a time.

What must hold in a worker is checked where it could break; a `Broken` says what did not.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal.spec.view import View

if TYPE_CHECKING:
    from tests.plan.crew_at_random import Driver, World


class Broken(AssertionError):
    pass


def must(holds, what):
    if not holds:
        raise Broken(what)


@dataclass(eq=False)
class Mesh:
    """The members of one training view: who has come, who has laid down what, who left the others alone."""

    view: View
    workers: dict[int, Worker]
    here: set[int] = field(default_factory=set)
    laid: dict[int, dict[int, bool]] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)

    def broken(self):
        return bool(self.left) or not all(worker.alive for worker in self.workers.values())


@dataclass(eq=False)
class Wire:
    """A connection between a worker and a driver."""

    worker: Worker
    driver: Driver
    up: deque = field(default_factory=deque)
    down: deque = field(default_factory=deque)
    welcomed: bool = False
    closed: bool = False
    seat: int | None = None


@dataclass(eq=False)
class Worker:
    """Follows the protocol: its thread waits, catches up, meets, trains, follows, loads; its tie hears the driver."""

    world: World
    local: bool
    seat: int | None
    position: int | None
    alive: bool = True
    frozen: bool = False
    terminated: bool = False
    stage: str = "building"
    number: int = 0
    seen: View | None = None
    aborted: int = 0
    moved_to: int | None = None
    mesh: Mesh | None = None
    laid: bool = False
    source: Worker | None = None
    fed: bool = False
    moves: bool = False  # it may have followed others further than it said
    wire: Wire | None = None
    outbox: deque = field(default_factory=deque)

    # ---- the tie ----

    def connect(self):
        driver = self.world.driver
        if driver is None or (self.wire and not self.wire.closed and self.wire.driver is driver):
            return
        self.wire = Wire(self, driver)
        driver.wires.append(self.wire)
        training = self.stage not in ("building", "waiting")
        self.wire.up.append(("here", self.moved_to or self.seat, self.seen.number if self.seen else 0, training))

    def hear(self):
        wire = self.wire
        if not wire or wire.closed or not wire.down:
            return
        kind, value = wire.down.popleft()
        if kind == "welcome":
            if self.seat is None:
                self.seat = value
            elif value != self.seat:
                self.moved_to, self.aborted = value, max(self.aborted, self.number)
            wire.welcomed = True
            if self.stage == "waiting":
                self.say()
        elif self.seen is None or value.number > self.seen.number:
            self.seen = value
            if value.halt == "now":
                self.aborted = max(self.aborted, value.number - 1)

    def say(self):
        """Where it stands. What nobody took yet waits for the next driver."""
        if self.wire and self.wire.welcomed and not self.wire.closed:
            self.outbox.append(("stands", self.number, self.position))

    def flush(self):
        wire = self.wire
        if wire and wire.welcomed and not wire.closed:
            wire.up.extend(self.outbox)
            self.outbox.clear()

    # ---- the thread ----

    def act(self):
        getattr(self, f"_{self.stage}")()

    def _wait(self):
        self.stage, self.laid = "waiting", False
        self.say()

    def _fail(self):
        self.mesh.left.add(self.seat)
        self._wait()

    def _building(self):
        if self.wire and self.wire.welcomed:
            self._wait()

    def _waiting(self):
        if self.moved_to is not None:
            self.seat, self.moved_to = self.moved_to, None
        view = self.seen
        if view and view.number > self.number and view.concerns(self.seat):
            self._take(view)
        elif self.terminated and self.world.driver is None:
            self.end()
        elif self.world.chance(0.3):
            self.say()

    def _take(self, view):
        self.number = view.number
        if self.mesh:
            self.mesh.left.add(self.seat)
        if self.seat in view.leave or view.stop:
            if view.saver == self.seat:
                self.world.checkpoint = max(self.world.checkpoint, self.position)
            self.end()
        elif view.loads == self.seat:
            self.stage = "loading"
        elif self.seat in view.followers:
            self.stage, self.fed = "following", False
            self.source = self.world.driver_knows(view.source)
        elif self.seat in view.carries:
            self.mesh, self.laid = self.world.meshes[id(view)], False
            self.stage = "catching"
        else:
            self._wait()

    def _loading(self):
        self.position = self.world.checkpoint
        self._wait()

    def _following(self):
        source = self.source
        if source is None or not source.alive:
            self.source = None
            self._wait()
        elif self.seen.number > self.number:
            self._wait()
        elif not self.fed:
            if source.stage == "training" and not source.laid:
                self.position, self.fed = source.position, True
        elif self.position < source.position:
            self.position += 1
            self.moves = True
        else:
            self.say()

    def _catching(self):
        view, source = self.mesh.view, self.source
        if self.position == view.position:
            self._meet()
        elif source and self.fed and source.alive and (self.position or 0) < view.position <= source.position:
            self.position = view.position
        elif view.source is None or view.source == self.seat:
            self._fail()
        else:
            self.source, self.fed, holder = None, False, self.mesh.workers[view.source]
            if holder.alive and not holder.frozen and holder.mesh is self.mesh and holder.stage == "meeting":
                self.position = holder.position
            elif self.aborted >= view.number or not holder.alive or holder.number > view.number or self.mesh.left:
                self._fail()

    def _meet(self):
        self.mesh.here.add(self.seat)
        self.stage = "meeting"

    def _meeting(self):
        mesh = self.mesh
        given_up = self.aborted >= mesh.view.number
        all_here = mesh.here >= set(mesh.view.carries)
        if given_up or (mesh.broken() and (not all_here or self.world.chance(0.5))):
            self._fail()
        elif all_here:
            must(self.position == mesh.view.position, "who enters a view does not hold what it starts from")
            must(not self.laid, "a step was begun before the view")
            self.stage, self.moves = "training", False

    def _training(self):
        mesh, alone = self.mesh, len(self.mesh.view.carries) == 1
        given_up = self.aborted >= mesh.view.number
        laid = mesh.laid.setdefault(self.position, {})
        if not self.laid:
            halt = self.seen.number > self.number or (self.terminated and self.world.driver is None)
            if given_up or (mesh.broken() and self.world.chance(0.5)):
                self._fail()
            elif halt and alone:
                self._wait()
            else:
                laid[self.seat], self.laid = halt, True
        elif laid.keys() == mesh.view.carries.keys() and not ((given_up or mesh.broken()) and self.world.chance(0.3)):
            self._commit(any(laid.values()))
        elif given_up or mesh.broken():
            self._fail()

    def _commit(self, halt):
        self.position += 1
        self.laid = False
        self.world.commits += 1
        if self.mesh.view.saver == self.seat and self.world.chance(0.2):
            self.world.checkpoint = max(self.world.checkpoint, self.position)
        if halt:
            self._wait()

    def end(self):
        """The process is gone."""
        self.alive = False
        if self.wire and not self.wire.closed:
            self.wire.up.append(("lost",))
