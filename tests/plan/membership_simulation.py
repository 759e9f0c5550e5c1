"""A run without processes and without time: workers that keep to the protocol, a driver around a real
`MembershipPolicy`, and messages between them that take as long as chance wants. Anything may die, freeze, come, go or
be put out at any moment.

What must always hold is checked where it could break; an `InvariantViolation` says what did not.
"""

from __future__ import annotations

import os
import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from shoal.plan import lane_assignment
from shoal.plan.members import EvictWorker, StartWorkers
from shoal.plan.membership_policy import MembershipPolicy
from shoal.spec.view import Address, Attachment, View
from tests.plan.simulated_worker import SimulatedConnection, SimulatedGroup, SimulatedWorker, require

NO_ADDRESS = Address(host="", port=0)
SAVE_LOCK = Path(tempfile.gettempdir(), f"shoal-simulated-{os.getpid()}.lock")


@dataclass(eq=False)
class SimulatedDriver:
    """What `jobs.worker_group` does around a membership policy, with wires instead of sockets."""

    simulation: MembershipSimulation
    policy: MembershipPolicy
    connections: list[SimulatedConnection] = field(default_factory=list)
    connection_by_seat: dict[int, SimulatedConnection] = field(default_factory=dict)
    last_view: dict[int, View] = field(default_factory=dict)
    evicted: set[int] = field(default_factory=set)
    leaving: set[int] = field(default_factory=set)

    def receive(self, wire):
        if wire.closed or not wire.to_driver:
            return
        kind, *fields = wire.to_driver.popleft()
        if kind == "here":
            self._on_hello(wire, *fields)
        elif kind == "stands" and self.connection_by_seat.get(wire.seat) is wire:
            self.policy.stopped_at(wire.seat, self.simulation.now_s, view=fields[0], position=fields[1])
        elif kind == "lost":
            wire.closed = True
            if not wire.worker.managed and self.connection_by_seat.get(wire.seat) is wire:
                self.evict(wire.seat)
        self.decide()

    def _on_hello(self, wire, wanted, view, training):
        worker = wire.worker
        seat = wanted
        if not worker.managed and (wanted is None or (wanted in self.evicted and wanted not in self.policy.members)):
            seat = self.simulation.new_seat()
        if worker.managed and self.simulation.processes.get(seat) is not worker:
            wire.closed = True
            return
        if seat in self.connection_by_seat:
            self.connection_by_seat[seat].closed = True
        wire.seat, self.connection_by_seat[seat] = seat, wire
        known = seat in self.policy.members
        attachment = Attachment(managed=worker.managed, can_save=worker.can_save, needs_job=not worker.can_save)
        self.policy.arrived(seat, attachment, address=NO_ADDRESS, view=view, training=training and not known)
        wire.to_worker.append(("welcome", seat))
        if seat in self.last_view:
            wire.to_worker.append(("view", self.last_view[seat]))

    def process_exited(self, seat):
        """The engine reports an exit."""
        self.simulation.processes.pop(seat)
        self._remove(seat)
        self.decide()

    def evict(self, seat):
        worker = self.connection_by_seat[seat].worker
        if worker.managed:
            worker.die()
            return
        self.evicted.add(seat)
        self.connection_by_seat[seat].closed = True
        self._remove(seat)
        self.decide()

    def _remove(self, seat):
        self.policy.gone(seat)
        self.connection_by_seat.pop(seat, None)
        self.last_view.pop(seat, None)

    def decide(self):
        """Once, or until there is nothing more to do: it comes to that soon."""
        for _ in range(4):
            orders = self.policy.decide(self.simulation.now_s)
            self.execute(orders)
            if not orders or self.simulation.happens(0.5):
                return
        require(False, "there is no end of orders")

    def execute(self, orders):
        for order in orders:
            if isinstance(order, StartWorkers):
                for _ in range(order.count):
                    self.policy.expect(self.simulation.start_managed().seat)
            elif isinstance(order, EvictWorker):
                self.evict(order.seat)
            else:
                self.publish(order)

    def publish(self, order):
        view = order.view
        self.simulation.views += 1
        require(view.number > self.simulation.newest_number(self), "the number of a view does not grow")
        self.simulation.newest_numbers[self] = view.number
        if view.carries:
            self._check_training(order)
            members = {seat: self.connection_by_seat[seat].worker for seat in view.carries}
            self.simulation.meshes[id(view)] = SimulatedGroup(view, members)
            self.simulation.published_views.append(view)  # so that its id stays its own
        if view.leave:
            self._check_leaving(view)
        for seat in order.seats:
            self.last_view[seat] = view
            wire = self.connection_by_seat[seat]
            seen = wire.worker.newest_view
            require(seen is None or view.number > seen.number, "who gets the view has seen a later one")
            wire.to_worker.append(("view", view))

    def _check_training(self, order):
        view, world = order.view, self.simulation
        require(sorted(lane for mine in view.carries.values() for lane in mine) == list(range(world.lanes)), "lanes")
        require(all(view.carries.values()), "a member carries nothing")
        require(order.seats == sorted(view.carries), "it goes to others than its members")
        saver = self.connection_by_seat[view.saver].worker
        require(saver.can_save and view.saver in view.carries, "the saver cannot save, or carries nothing")
        for worker in self.members():
            require(worker.stage not in ("catching", "meeting", "training"), f"seat {worker.seat} does not stand")
        for worker in self.members():
            require(worker.may_be_ahead or (worker.position or 0) <= view.position, f"seat {worker.seat} is further")
        holders = [view.source] if view.source is not None else list(view.carries)
        for worker in (self.connection_by_seat[seat].worker for seat in holders):
            require(worker.may_be_ahead or worker.position == view.position, "the source holds something else")

    def _check_leaving(self, view):
        if view.saver is not None:
            require(
                view.leave == [view.saver] and self.connection_by_seat[view.saver].worker.can_save,
                "it leaves and cannot save",
            )
            return
        self.leaving.update(view.leave)
        staying = [self.connection_by_seat[seat].worker for seat in self.policy.members if seat not in self.leaving]
        kept = max((w.position for w in staying if w.position is not None and w.alive), default=None)
        for worker in (self.connection_by_seat[seat].worker for seat in view.leave):
            lost = worker.position is not None and worker.alive and not worker.may_be_ahead
            dead = any(not w.alive for w in staying)  # it died meanwhile, which nobody could know
            require(not lost or dead or worker.position <= (kept or 0), "the only holder was sent away")

    def members(self):
        """The members of the view as they really are, which the policy may not know yet."""
        return [
            self.connection_by_seat[seat].worker
            for seat in self.policy.members
            if self.connection_by_seat[seat].worker.alive
        ]


class MembershipSimulation:
    """Everything there is, and what happens next."""

    def __init__(self, seed, *, lanes=None, workers=None):
        self.rng = random.Random(seed)
        self.happens = lambda p: self.rng.random() < p
        self.lanes = lanes or self.rng.randint(1, 6)
        self.sharing_machines = self.rng.choice((1.0, 0.5))
        self.initial_workers = workers or self.rng.randint(1, min(4, self.lanes + 1))
        self.now_s = 0.0
        self.seats = 0
        self.views = self.commits = self.checkpoint = 0
        self.workers: list[SimulatedWorker] = []
        self.processes: dict[int, SimulatedWorker] = {}
        self.meshes: dict[int, SimulatedGroup] = {}
        self.published_views: list[View] = []
        self.newest_numbers: dict[SimulatedDriver, int] = {}
        self.driver: SimulatedDriver | None = None
        self.save_lock = SAVE_LOCK
        self.new_driver()

    def close(self):
        """Ends the threads of all workers."""
        for worker in self.workers:
            worker.end_thread()

    # ---- what there is ----

    def new_seat(self):
        self.seats += 1
        return self.seats - 1

    def start_managed(self):
        """On a machine that shares the run's directory, or on one that does not where somebody else can save."""
        others_save = any(worker.can_save for worker in self.alive_workers())
        can_save = not others_save or self.happens(self.sharing_machines)
        position = 0 if can_save else None
        worker = SimulatedWorker(self, managed=True, can_save=can_save, seat=self.new_seat(), position=position)
        self.processes[worker.seat] = worker
        self.workers.append(worker)
        return worker

    def _joining_worker(self):
        can_save = self.happens(0.3)
        return SimulatedWorker(self, managed=False, can_save=can_save, seat=None, position=0 if can_save else None)

    def new_driver(self):
        self.driver = SimulatedDriver(self, MembershipPolicy(lanes=self.lanes, wanted_workers=self.initial_workers))
        self.processes = {seat: worker for seat, worker in self.processes.items() if worker.alive}
        for seat in self.processes:
            self.driver.policy.expect(seat)
        self.driver.decide()

    def newest_number(self, driver):
        return self.newest_numbers.get(driver, 0)

    def worker_at(self, seat):
        wire = self.driver.connection_by_seat.get(seat) if self.driver else None
        return wire.worker if wire else None

    def alive_workers(self):
        return [worker for worker in self.workers if worker.alive]

    # ---- what happens ----

    def step(self, faults=0.0):
        """One event."""
        self.now_s += 0.05
        if faults and self.happens(faults):
            self.rng.choice(FAULTS)(self)
            return
        if self.driver is None:
            if self.happens(0.05):
                self.new_driver()
        elif self.happens(0.3):
            self._drive()
            return
        awake = [worker for worker in self.workers if worker.alive and not worker.frozen]
        if awake:
            worker = self.rng.choice(awake)
            self.rng.choice(
                (
                    worker.run_stage,
                    worker.run_stage,
                    worker.run_stage,
                    worker.receive,
                    worker.receive,
                    worker.flush,
                    worker.connect,
                )
            )()

    def _drive(self):
        driver = self.driver
        dead = [seat for seat, worker in self.processes.items() if not worker.alive]
        if dead and self.happens(0.3):
            driver.process_exited(self.rng.choice(dead))
        elif self.happens(0.1):
            driver.decide()
        elif driver.connections:
            driver.connections = [wire for wire in driver.connections if not wire.closed or wire.to_driver]
            if driver.connections:
                driver.receive(self.rng.choice(driver.connections))

    # ---- faults ----

    def kill(self):
        if living := self.alive_workers():
            self.rng.choice(living).die()

    def freeze(self):
        if living := self.alive_workers():
            worker = self.rng.choice(living)
            worker.frozen = not worker.frozen

    def evict(self):
        """Suspicion falls on anybody, with or without a reason."""
        if self.driver:
            known = [seat for seat in self.driver.policy.members if self.driver.connection_by_seat[seat].worker.alive]
            if known:
                self.driver.evict(self.rng.choice(known))

    def terminate(self):
        if self.driver and self.driver.policy.members:
            seat = self.rng.choice(list(self.driver.policy.members))
            self.driver.connection_by_seat[seat].worker.terminated = True
            self.driver.policy.drain(seat, "terminated", replace=True)
            self.driver.decide()

    def drain(self):
        if self.driver and self.driver.policy.members:
            self.driver.policy.drain(self.rng.choice(list(self.driver.policy.members)), "drained", replace=False)
            self.driver.decide()

    def join(self):
        if len(self.alive_workers()) < 8:
            self.workers.append(self._joining_worker())

    def scale(self):
        if self.driver:
            self.driver.policy.scale(self.rng.randint(1, 5))
            self.driver.decide()

    def lose_driver(self):
        self.driver = None

    def drop_connection(self):
        """A connection breaks."""
        if self.driver:
            wires = [wire for wire in self.driver.connections if not wire.closed and wire.worker.connection is wire]
            if wires:
                wire = self.rng.choice(wires)
                wire.to_driver.append(("lost",))
                wire.worker.connection = None

    def measure(self):
        """For a while every worker has a speed of its own."""
        if self.driver and self.driver.policy.members:
            policy = self.driver.policy
            paces = {seat: self.rng.choice((0.1, 0.2, 1.0)) for seat in policy.members}
            for second in range(1, 9):
                for seat, pace in paces.items():
                    policy.observe_lanes(seat, self.now_s + 2.0 * second, count=second, total_s=second * pace)

    def break_deadlock(self):
        if self.driver:
            self.driver.policy.exchange_stalled()
            self.driver.decide()

    # ---- calm ----

    def end_faults(self):
        """No faults from now on: who was frozen goes on or is put out, and there is a driver."""
        for worker in self.alive_workers():
            if worker.frozen and worker.managed:
                worker.die()
            worker.frozen = False
        if self.driver is None:
            self.new_driver()

    def converged(self):
        """Everybody who is wanted is there; all who should carry lanes do, and train."""
        policy, connections = self.driver.policy, self.driver.connection_by_seat
        if policy.view is None or policy._expected or any(m.leaving for m in policy.members.values()):
            return False
        if len(policy.members) < policy.wanted_workers or {connections[seat].worker for seat in policy.members} != set(
            self.alive_workers()
        ):
            return False
        carriers = [connections[seat].worker if seat in connections else None for seat in policy.view.carries]
        if not all(worker and worker.stage == "training" and worker.group.view is policy.view for worker in carriers):
            return False
        paces = {seat: policy.balance.paces.get(seat) for seat in policy.members}
        fair = lane_assignment.assign_by_speed(self.lanes, paces)
        idle = [seat for seat in policy.members if seat not in policy.view.carries and fair[seat]]
        return not idle or len(policy.view.carries) == self.lanes


FAULTS = [
    MembershipSimulation.kill,
    MembershipSimulation.kill,
    MembershipSimulation.freeze,
    MembershipSimulation.evict,
    MembershipSimulation.terminate,
    MembershipSimulation.drain,
    MembershipSimulation.join,
    MembershipSimulation.scale,
    MembershipSimulation.lose_driver,
    MembershipSimulation.drop_connection,
    MembershipSimulation.measure,
    MembershipSimulation.measure,
    MembershipSimulation.break_deadlock,
]
