"""A run without processes and without time: workers that keep to the protocol, a driver around a real `Crew`, and
messages between them that take as long as chance wants. Anything may die, freeze, come, go or be put out at any moment.

What must always hold is checked where it could break; a `Broken` says what did not.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from shoal.plan.crew import Crew, Start
from shoal.spec.view import Address, View

NOWHERE = Address(host="", port=0)


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
            self.stage = "training"

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


@dataclass(eq=False)
class Driver:
    """What `jobs.helm` does around a crew, with wires instead of sockets."""

    world: World
    crew: Crew
    wires: list[Wire] = field(default_factory=list)
    voices: dict[int, Wire] = field(default_factory=dict)
    latest: dict[int, View] = field(default_factory=dict)
    out: set[int] = field(default_factory=set)

    def hear(self, wire):
        if wire.closed or not wire.up:
            return
        kind, *fields = wire.up.popleft()
        if kind == "here":
            self._here(wire, *fields)
        elif kind == "stands" and self.voices.get(wire.seat) is wire:
            self.crew.stands(wire.seat, self.world.now_s, view=fields[0], position=fields[1])
        elif kind == "lost":
            wire.closed = True
            if not wire.worker.local and self.voices.get(wire.seat) is wire:
                self.put_out(wire.seat)
        self.steer()

    def _here(self, wire, wanted, view, training):
        worker = wire.worker
        seat = wanted
        if not worker.local and (wanted is None or (wanted in self.out and wanted not in self.crew.members)):
            seat = self.world.new_seat()
        if worker.local and self.world.processes.get(seat) is not worker:
            wire.closed = True
            return
        if seat in self.voices:
            self.voices[seat].closed = True
        wire.seat, self.voices[seat] = seat, wire
        known = seat in self.crew.members
        self.crew.arrived(seat, local=worker.local, address=NOWHERE, view=view, training=training and not known)
        wire.down.append(("welcome", seat))
        if seat in self.latest:
            wire.down.append(("view", self.latest[seat]))

    def ended(self, seat):
        """The engine tells of a local process that is gone."""
        self.world.processes.pop(seat)
        self._forget(seat)
        self.steer()

    def put_out(self, seat):
        worker = self.voices[seat].worker
        if worker.local:
            worker.end()
            return
        self.out.add(seat)
        self.voices[seat].closed = True
        self._forget(seat)
        self.steer()

    def _forget(self, seat):
        self.crew.gone(seat)
        self.voices.pop(seat, None)
        self.latest.pop(seat, None)

    def steer(self):
        for order in self.crew.orders(self.world.now_s):
            if isinstance(order, Start):
                for _ in range(order.number):
                    self.crew.expect(self.world.start_local().seat)
            else:
                self.publish(order)
        must(not self.crew.orders(self.world.now_s), "asked twice, it answers twice")

    def publish(self, order):
        view = order.view
        self.world.views += 1
        must(view.number > self.world.newest_of(self), "the number of a view does not grow")
        self.world.numbers[self] = view.number
        if view.carries:
            self._check_training(order)
            members = {seat: self.voices[seat].worker for seat in view.carries}
            self.world.meshes[id(view)] = Mesh(view, members)
            self.world.kept.append(view)  # so that its id stays its own
        if view.leave:
            self._check_leaving(view)
        for seat in order.to:
            self.latest[seat] = view
            wire = self.voices[seat]
            seen = wire.worker.seen
            must(seen is None or view.number > seen.number, "who gets the view has seen a later one")
            wire.down.append(("view", view))

    def _check_training(self, order):
        view, world = order.view, self.world
        must(sorted(lane for mine in view.carries.values() for lane in mine) == list(range(world.lanes)), "lanes")
        must(all(view.carries.values()), "a member carries nothing")
        must(order.to == sorted(view.carries), "it goes to others than its members")
        saver = self.voices[view.saver].worker
        must(saver.local and view.saver in view.carries, "the saver cannot save, or carries nothing")
        for worker in self.members():
            must(worker.stage not in ("catching", "meeting", "training"), f"seat {worker.seat} does not stand")
        for worker in self.members():
            fed = worker.source is not None
            must(fed or (worker.position or 0) <= view.position, f"seat {worker.seat} is further")
        holders = [view.source] if view.source is not None else list(view.carries)
        for worker in (self.voices[seat].worker for seat in holders):
            must(worker.source is not None or worker.position == view.position, "the source holds something else")

    def _check_leaving(self, view):
        staying = [self.voices[seat].worker for seat, m in self.crew.members.items() if not m.leaving]
        kept = max((w.position for w in staying if w.position is not None and w.alive), default=None)
        for worker in (self.voices[seat].worker for seat in view.leave):
            lost = worker.position is not None and worker.alive and worker.source is None
            dead = any(not w.alive for w in staying)  # it died meanwhile, which nobody could know
            must(not lost or dead or worker.position <= (kept or 0), "the only holder was sent away")

    def members(self):
        """Those who are in, as they are and not as the crew thinks."""
        return [self.voices[seat].worker for seat in self.crew.members if self.voices[seat].worker.alive]


class World:
    """Everything there is, and what happens next."""

    def __init__(self, seed, *, lanes=None, workers=None):
        self.rng = random.Random(seed)
        self.chance = lambda p: self.rng.random() < p
        self.lanes = lanes or self.rng.randint(1, 6)
        self.first_number = workers or self.rng.randint(1, min(4, self.lanes + 1))
        self.now_s = 0.0
        self.seats = 0
        self.views = self.commits = self.checkpoint = 0
        self.workers: list[Worker] = []
        self.processes: dict[int, Worker] = {}
        self.meshes: dict[int, Mesh] = {}
        self.kept: list[View] = []
        self.numbers: dict[Driver, int] = {}
        self.driver: Driver | None = None
        self.new_driver()

    # ---- what there is ----

    def new_seat(self):
        self.seats += 1
        return self.seats - 1

    def start_local(self):
        worker = Worker(self, local=True, seat=self.new_seat(), position=0)
        self.processes[worker.seat] = worker
        self.workers.append(worker)
        return worker

    def new_driver(self):
        self.driver = Driver(self, Crew(lanes=self.lanes, wanted=self.first_number))
        self.processes = {seat: worker for seat, worker in self.processes.items() if worker.alive}
        for seat in self.processes:
            self.driver.crew.expect(seat)
        self.driver.steer()

    def newest_of(self, driver):
        return self.numbers.get(driver, 0)

    def driver_knows(self, seat):
        wire = self.driver.voices.get(seat) if self.driver else None
        return wire.worker if wire else None

    def living(self):
        return [worker for worker in self.workers if worker.alive]

    # ---- what happens ----

    def happen(self, faults=0.0):
        """One event."""
        self.now_s += 0.05
        if faults and self.chance(faults):
            self.rng.choice(FAULTS)(self)
            return
        if self.driver is None:
            if self.chance(0.05):
                self.new_driver()
        elif self.chance(0.3):
            self._drive()
            return
        awake = [worker for worker in self.workers if worker.alive and not worker.frozen]
        if awake:
            worker = self.rng.choice(awake)
            self.rng.choice((worker.act, worker.act, worker.act, worker.hear, worker.hear, worker.flush, worker.connect))()

    def _drive(self):
        driver = self.driver
        dead = [seat for seat, worker in self.processes.items() if not worker.alive]
        if dead and self.chance(0.3):
            driver.ended(self.rng.choice(dead))
        elif self.chance(0.1):
            driver.steer()
        elif driver.wires:
            driver.wires = [wire for wire in driver.wires if not wire.closed or wire.up]
            if driver.wires:
                driver.hear(self.rng.choice(driver.wires))

    # ---- faults ----

    def kill(self):
        if living := self.living():
            self.rng.choice(living).end()

    def freeze(self):
        if living := self.living():
            worker = self.rng.choice(living)
            worker.frozen = not worker.frozen

    def put_out(self):
        """Suspicion falls on anybody, with or without a reason."""
        if self.driver:
            known = [seat for seat in self.driver.crew.members if self.driver.voices[seat].worker.alive]
            if known:
                self.driver.put_out(self.rng.choice(known))

    def terminate(self):
        if self.driver and self.driver.crew.members:
            seat = self.rng.choice(list(self.driver.crew.members))
            self.driver.voices[seat].worker.terminated = True
            self.driver.crew.leaves(seat, "terminated", replace=True)
            self.driver.steer()

    def drain(self):
        if self.driver and self.driver.crew.members:
            self.driver.crew.leaves(self.rng.choice(list(self.driver.crew.members)), "drained", replace=False)
            self.driver.steer()

    def join(self):
        if len(self.living()) < 8:
            self.workers.append(Worker(self, local=False, seat=None, position=None))

    def scale(self):
        if self.driver:
            self.driver.crew.scale(self.rng.randint(1, 5))
            self.driver.steer()

    def lose_driver(self):
        self.driver = None

    def blink(self):
        """A connection breaks."""
        if self.driver:
            wires = [wire for wire in self.driver.wires if not wire.closed]
            if wires:
                wire = self.rng.choice(wires)
                wire.up.append(("lost",))
                wire.worker.wire = None

    def measure(self):
        if self.driver and self.driver.crew.members:
            self.driver.crew.measured(self.rng.choice(list(self.driver.crew.members)), self.rng.choice((0.1, 0.2, 1.0)))

    def cut(self):
        if self.driver:
            self.driver.crew.stuck()
            self.driver.steer()

    # ---- calm ----

    def calm(self):
        """No faults from now on: who was frozen goes on or is put out, and there is a driver."""
        for worker in self.living():
            if worker.frozen and worker.local:
                worker.end()
            worker.frozen = False
        if self.driver is None:
            self.new_driver()

    def settled(self):
        """Everybody who is wanted carries lanes, or there are none left; all of them train."""
        crew = self.driver.crew
        if crew.view is None or crew._expected or any(m.leaving for m in crew.members.values()):
            return False
        if len(crew.members) < crew.wanted or len(self.living()) != len(crew.members):
            return False
        busy = {seat for seat, m in crew.members.items() if m.training}
        carriers = [self.driver.voices.get(seat) for seat in crew.view.carries]
        all_of_them = all(wire and wire.worker.stage == "training" for wire in carriers)
        enough = busy == set(crew.members) or len(crew.view.carries) == self.lanes
        return all_of_them and busy == set(crew.view.carries) and enough


FAULTS = [
    World.kill,
    World.kill,
    World.freeze,
    World.put_out,
    World.terminate,
    World.drain,
    World.join,
    World.scale,
    World.lose_driver,
    World.blink,
    World.measure,
    World.measure,
    World.cut,
]
