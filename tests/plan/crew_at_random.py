"""A run without processes and without time: workers that keep to the protocol, a driver around a real `Crew`, and
messages between them that take as long as chance wants. Anything may die, freeze, come, go or be put out at any moment.

What must always hold is checked where it could break; a `Broken` says what did not.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from shoal.plan import balance
from shoal.plan.crew import Crew, Start
from shoal.spec.view import Address, View
from tests.plan.simulated_worker import Mesh, Wire, Worker, must

NOWHERE = Address(host="", port=0)


@dataclass(eq=False)
class Driver:
    """What `jobs.helm` does around a crew, with wires instead of sockets."""

    world: World
    crew: Crew
    wires: list[Wire] = field(default_factory=list)
    voices: dict[int, Wire] = field(default_factory=dict)
    latest: dict[int, View] = field(default_factory=dict)
    out: set[int] = field(default_factory=set)
    away: set[int] = field(default_factory=set)

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
        """Once, or until there is nothing more to do: it comes to that soon."""
        for _ in range(4):
            orders = self.crew.orders(self.world.now_s)
            self.carry_out(orders)
            if not orders or self.world.chance(0.5):
                return
        must(False, "there is no end of orders")

    def carry_out(self, orders):
        for order in orders:
            if isinstance(order, Start):
                for _ in range(order.number):
                    self.crew.expect(self.world.start_local().seat)
            else:
                self.publish(order)

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
            must(worker.moves or (worker.position or 0) <= view.position, f"seat {worker.seat} is further")
        holders = [view.source] if view.source is not None else list(view.carries)
        for worker in (self.voices[seat].worker for seat in holders):
            must(worker.moves or worker.position == view.position, "the source holds something else")

    def _check_leaving(self, view):
        if view.saver is not None:
            must(view.leave == [view.saver] and self.voices[view.saver].worker.local, "it leaves and cannot save")
            return
        self.away.update(view.leave)
        staying = [self.voices[seat].worker for seat in self.crew.members if seat not in self.away]
        kept = max((w.position for w in staying if w.position is not None and w.alive), default=None)
        for worker in (self.voices[seat].worker for seat in view.leave):
            lost = worker.position is not None and worker.alive and not worker.moves
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
            self.rng.choice(
                (worker.act, worker.act, worker.act, worker.hear, worker.hear, worker.flush, worker.connect)
            )()

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
            wires = [wire for wire in self.driver.wires if not wire.closed and wire.worker.wire is wire]
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
        """Everybody who is wanted is there; all who should carry lanes do, and train."""
        crew, voices = self.driver.crew, self.driver.voices
        if crew.view is None or crew._expected or any(m.leaving for m in crew.members.values()):
            return False
        if len(crew.members) < crew.wanted or {voices[seat].worker for seat in crew.members} != set(self.living()):
            return False
        carriers = [voices[seat].worker if seat in voices else None for seat in crew.view.carries]
        if not all(worker and worker.stage == "training" and worker.mesh.view is crew.view for worker in carriers):
            return False
        fair = balance.shares(self.lanes, {seat: m.lane_s for seat, m in crew.members.items()})
        idle = [seat for seat in crew.members if seat not in crew.view.carries and fair[seat]]
        return not idle or len(crew.view.carries) == self.lanes


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
