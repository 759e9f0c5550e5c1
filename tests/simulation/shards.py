"""Sharded membership in virtual time: a real `ShardedMembershipPolicy`, real recovery, and a model of the shards.

A replica is several ranks, each with one shard. A shard is modelled as its number and the steps that it has made. The
members of a view tell each other what they hold, decide with the real `recovery_point` from where they continue, and
then commit steps in two phases, as `ShardedSync` does: all vote, and who has seen every vote applies the step.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from shoal.plan.members import EvictWorker, MembershipAction, StartWorkers
from shoal.plan.sharded_membership import ShardedMembershipPolicy
from shoal.sharding.recovery import HeldShard, RecoveryPoint, can_reach, plan_transfers, recovery_point
from shoal.spec.view import Address, View, position_of
from shoal.train.worker import STARTED_BY_ENGINE
from tests.simulation.history import Fault
from tests.simulation.network import Network
from tests.simulation.world import START_S, InvariantViolation, Process, World, require

TICK_S, STEP_S, SAVE_S, RENDEZVOUS_S, CALM_S = 0.1, 0.05, 0.6, 1.2, 300.0


class Rank(Process):
    """A worker that holds one shard. `held` is what it tells the others when they enter a view."""

    def __init__(self, run: ShardedRun, seat: int) -> None:
        super().__init__(run.world, f"worker-{seat}")
        self.run, self.seat = run, seat
        self.held = HeldShard()
        self.view: View | None = None
        self.newest = 0
        self.entered = False
        self.asked_to_halt = False
        self._mail: defaultdict[tuple[int, str], dict[int, Any]] = defaultdict(dict)
        self.at(0.3 * self.world.rng.random(), self._report)

    def _report(self) -> None:
        """It has stopped, and waits for a view."""
        self.view = None
        step = self.held.step
        position = None if step is None else position_of(step, evaluated=False)
        saved = step is not None and step == self.run.checkpoint
        self.run.to_driver(self, "stopped_at", view=self.newest, position=position, checkpointed=saved)

    def receive_view(self, view: View) -> None:
        if view.number <= self.newest:
            return
        self.newest = view.number
        if view.stop or self.seat in view.leave:
            self.run.leaves(self)
        elif view.halt == "boundary" and self.view is not None:
            self.asked_to_halt = True
        elif self.seat in view.carries:
            self._enter(view)
        else:
            self._report()

    def _enter(self, view: View) -> None:
        self.view, self.entered, self.asked_to_halt = view, False, False
        self._tell("held", self.held)
        self.at(RENDEZVOUS_S, self._give_up, view.number)

    def _give_up(self, number: int) -> None:
        if self.view is not None and self.view.number == number and not self.entered:
            self.lose_peer(number)

    def lose_peer(self, number: int) -> None:
        """A member of this view is gone: it stops, and so do the others."""
        if self.view is not None and self.view.number == number:
            view, self.view = self.view, None
            for seat in view.carries:
                if seat != self.seat:
                    self.run.send_peer(self, seat, "lose_peer", number)
            self._report()

    # ---- what members tell each other ----

    def _tell(self, what: str, content: Any) -> None:
        assert self.view is not None
        for seat in self.view.carries:
            self.run.send_peer(self, seat, "hear", self.view.number, what, self.seat, content)

    def hear(self, number: int, what: str, seat: int, content: Any) -> None:
        mail = self._mail[number, what]
        mail[seat] = content
        if self.view is not None and self.view.number == number:
            self._go_on(self.view)

    def _go_on(self, view: View) -> None:
        if not self.entered:
            told = self._mail[view.number, "held"]
            if len(told) == len(view.carries):
                self._recover(view, {view.places[seat]: held for seat, held in told.items()})
            return
        step = self.held.step
        votes = self._mail[view.number, f"vote {step}"]
        if len(votes) == len(view.carries) and self.held.pending == view.number:
            self._apply(view, halt=any(votes.values()))

    def _recover(self, view: View, held: dict[int, HeldShard]) -> None:
        point = recovery_point(held, replica_size=self.run.replica_size, checkpoint_step=self.run.checkpoint)
        self.run.check_recovery(view, held, point)
        transfers = plan_transfers(point, held, replica_size=self.run.replica_size)
        targets = {one.target_rank for one in transfers}
        rank, mine = view.places[self.seat], held[view.places[self.seat]]
        stays = bool(point.sources) and rank not in targets
        require(not stays or can_reach(mine, point.step, point.view), f"{self.name} keeps a shard that is not there")
        self.held = HeldShard(point.step, rank % self.run.replica_size, self.run.replica_size, point.view)
        self.entered = True
        self._continue(view.number)

    def _continue(self, number: int) -> None:
        """Make the next step; after the last, save until it has worked."""
        view = self.view
        if view is None or view.number != number:
            return
        if self.held.step == self.run.steps:
            self.run.write_shard(view, self.run.steps, self.held.part)
            self.at(SAVE_S, self._continue, number)
        else:
            self.at(STEP_S * (0.5 + self.world.rng.random()), self._vote, number)

    def _vote(self, number: int) -> None:
        view = self.view
        if view is None or view.number != number:
            return
        held = self.held
        self.held = HeldShard(held.step, held.part, held.ways, held.view, pending=number)
        self.run.votes[number, held.step].add(self.seat)
        self._tell(f"vote {held.step}", self.asked_to_halt)
        self._go_on(view)

    def _apply(self, view: View, *, halt: bool) -> None:
        """It has seen every vote."""
        assert self.held.step is not None
        self.run.check_commit(view, self.held.step)
        step = self.held.step + 1
        self.held = HeldShard(step, self.held.part, self.held.ways, view.number)
        if step % self.run.save_every == 0 or halt:
            self.run.write_shard(view, step, self.held.part)
        if halt:
            self.at(SAVE_S, self._stop, view.number)
        else:
            self._continue(view.number)

    def _stop(self, number: int) -> None:
        """It has waited until the others have saved, or have not."""
        if self.view is not None and self.view.number == number:
            self._report()


class ShardedDriver(Process):
    """What `WorkerGroup` does around the policy."""

    def __init__(self, run: ShardedRun, policy: ShardedMembershipPolicy) -> None:
        super().__init__(run.world, "driver")
        self.run, self.policy = run, policy
        self.at(0.0, self._tick)

    def _tick(self) -> None:
        self.at(TICK_S, self._tick)
        self.decide()

    def hear(self, seat: int, fact: str, how: dict[str, Any]) -> None:
        if seat in self.policy.members:
            getattr(self.policy, fact)(seat, self.world.now_s, **how)
            self.decide()

    def arrived(self, seat: int) -> None:
        self.policy.arrived(seat, STARTED_BY_ENGINE, address=Address(host="simulated", port=seat))

    def gone(self, seat: int, *, left_cleanly: bool) -> None:
        self.policy.gone(seat, left_cleanly=left_cleanly)
        self.decide()

    def decide(self) -> None:
        for action in self.policy.decide(self.world.now_s):
            self._act(action)

    def _act(self, action: MembershipAction) -> None:
        if isinstance(action, StartWorkers):
            for _ in range(action.count):
                self.policy.expect(self.run.start_worker())
        elif isinstance(action, EvictWorker):
            self.run.kill(self.run.ranks[action.seat])
        else:
            self.run.check_view(action.view)
            for seat in action.seats:
                rank = self.run.ranks[seat]
                self.run.network.send("views", self, rank, rank.receive_view, action.view)


class ShardedRun:
    """Ranks, a driver, and what must always hold."""

    def __init__(self, seed: int, *, replica_size: int, replicas: int, lanes: int, steps: int, save_every: int) -> None:
        self.world = World(seed)
        self.network = Network(self.world)
        self.replica_size, self.lanes, self.steps, self.save_every = replica_size, lanes, steps, save_every
        self.ranks: list[Rank] = []
        self.released: set[int] = set()  # seats that were told to leave
        self.votes: defaultdict[tuple[int, int | None], set[int]] = defaultdict(set)
        self.checkpoint: int | None = None
        self.disk_is_full = False
        self.recoveries: dict[int, RecoveryPoint] = {}
        self._written: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        self.together = bool(seed % 2)
        self.driver = ShardedDriver(
            self,
            ShardedMembershipPolicy(
                lanes=lanes,
                wanted_workers=replica_size * replicas,
                balance_lanes=False,
                workers_per_replica=replica_size,
                lanes_shared_in_replica=self.together,
            ),
        )

    # ---- parts ----

    def start_worker(self) -> int:
        rank = Rank(self, len(self.ranks))
        self.ranks.append(rank)
        self.world.log(f"{rank.name} starts")
        self.driver.at(0.0, self.driver.arrived, rank.seat)
        return rank.seat

    def to_driver(self, rank: Rank, fact: str, **how: Any) -> None:
        self.world.log(f"{rank.name} {fact}", how)
        self.network.send("control", rank, self.driver, self.driver.hear, rank.seat, fact, how)

    def send_peer(self, rank: Rank, seat: int, call: str, *content: Any) -> None:
        target = self.ranks[seat]
        self.network.send("peers", rank, target, getattr(target, call), *content)

    def alive(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.alive]

    def leaves(self, rank: Rank) -> None:
        self.world.log(f"{rank.name} leaves")
        self._ends(rank, left_cleanly=True)

    def kill(self, rank: Rank) -> None:
        self.world.log(f"{rank.name} dies")
        self._ends(rank, left_cleanly=False)

    def _ends(self, rank: Rank, *, left_cleanly: bool) -> None:
        if not rank.alive:
            return
        rank.alive = rank.frozen = False
        self.driver.at(0.01, lambda: self.driver.gone(rank.seat, left_cleanly=left_cleanly))
        if rank.view is not None:
            for seat in rank.view.carries:
                self.ranks[seat].at(self.world.latency_s(), self.ranks[seat].lose_peer, rank.view.number)

    def write_shard(self, view: View, step: int, part: int) -> None:
        """A checkpoint is complete when every shard is written."""
        if not self.disk_is_full:
            self._written[view.number, step].add(part)
            if len(self._written[view.number, step]) == self.replica_size:
                self.checkpoint = max(self.checkpoint or 0, step)

    @property
    def finished(self) -> bool:
        return self.checkpoint == self.steps

    # ---- invariants ----

    def check_view(self, view: View) -> None:
        """Places are unique, replicas are whole, lanes are dealt once, and nobody holds a shard that the view lacks."""
        self.world.log("view", view)
        if not view.carries:
            self._check_leavers(view)
            return
        size = self.replica_size
        require(sorted(view.places.values()) == list(range(len(view.carries))), f"view {view.number}: {view.places}")
        require(view.places.keys() == view.carries.keys() and len(view.places) % size == 0, "a replica is not whole")
        rows = defaultdict(list)
        for seat, place in sorted(view.places.items(), key=lambda one: one[1]):
            rows[place // size].append(view.carries[seat])
        lanes = [lane for row in rows.values() for mine in (row[:1] if self.together else row) for lane in mine]
        require(sorted(lanes) == list(range(self.lanes)), f"view {view.number} does not deal each lane once")
        require(
            not self.together or all(one == row[0] for row in rows.values() for one in row), "ranks differ in lanes"
        )
        team = [self.ranks[seat] for seat in view.carries]
        if all(rank.alive for rank in team):  # else it makes no step, and a holder outside it is in the next one
            self._check_holders(view, team)

    def _check_holders(self, view: View, team: list[Rank]) -> None:
        """No state is lost while its holders live: the team has a holder of each shard of the newest step, if each
        shard has a living one."""
        living = [rank for seat, rank in enumerate(self.ranks) if rank.alive and seat not in self.released]
        best = max((rank.held.step or 0 for rank in living), default=0)
        if best <= (self.checkpoint or 0):
            return
        held = {rank.held.part for rank in living if rank.held.step == best}
        if len(held) < self.replica_size:
            return
        kept = {rank.held.part for rank in team if rank.held.step == best}
        require(held <= kept, f"view {view.number} leaves out the shards {held - kept} of step {best}")

    def _check_leavers(self, view: View) -> None:
        if not view.stop and view.leave:
            staying = self.driver.policy.members.keys() - set(view.leave)  # also one of whose death nobody knows yet
            self._check_holders(view, [self.ranks[seat] for seat in staying])
        self.released |= set(view.leave)

    def check_recovery(self, view: View, held: dict[int, HeldShard], point: RecoveryPoint) -> None:
        """All members decide the same, and a state whose shards are all there is not given up."""
        known = self.recoveries.setdefault(view.number, point)
        require(known == point, f"members of view {view.number} continue from {known} and {point}")
        self.world.log(f"recover {view.number}", point)
        newest = max(((one.step or 0, one.view) for one in held.values()), default=(0, 0))
        parts = {one.part for one in held.values() if one.step is not None and can_reach(one, *newest)}
        whole = len(parts) == self.replica_size
        require(not whole or point.step >= newest[0], f"view {view.number} gives up step {newest[0]}")
        require(point.step >= (self.checkpoint or 0), f"view {view.number} is behind the checkpoint")

    def check_commit(self, view: View, step: int) -> None:
        """A step commits only if every rank of every replica has voted for it in this view."""
        require(self.votes[view.number, step] == set(view.carries), f"step {step} commits without all ranks")


def run_sharded_history(seed: int) -> ShardedRun:
    """One history of a sharded run. Raises InvariantViolation."""
    rng = random.Random(seed)
    replicas = rng.randint(1, 3)
    run = ShardedRun(
        seed,
        replica_size=rng.randint(2, 3),
        replicas=replicas,
        lanes=6,
        steps=rng.randint(4, 12),
        save_every=rng.randint(2, 20),
    )
    at_s = 0.2 + rng.random()
    for _ in range(rng.choice((0, 1, 2, 3, 5, 7))):
        fault = Fault(at_s, rng.choice(tuple(SHARD_FAULTS)), rng.random(), rng.random(), 2 * rng.random())
        run.world.at(at_s, _inject, run, fault)
        at_s += rng.expovariate(1.0) * rng.choice((0.02, 0.2, 1.0))
    done = run.world.run(until_s=START_S + at_s + CALM_S, done=lambda: run.finished)
    require(done, "it does not end")
    return run


def fails_with_shards(seed: int) -> BaseException | None:
    try:
        run_sharded_history(seed)
    except (Exception, InvariantViolation) as failure:
        return failure
    return None


def _inject(run: ShardedRun, fault: Fault) -> None:
    run.world.log(f"FAULT {fault.kind}")
    SHARD_FAULTS[fault.kind](run, fault)


def _chosen(run: ShardedRun, fault: Fault) -> Rank | None:
    alive = run.alive()
    return alive[int(fault.which * len(alive))] if alive else None


def _kill(run: ShardedRun, fault: Fault) -> None:
    if rank := _chosen(run, fault):
        run.kill(rank)


def _kill_two(run: ShardedRun, fault: Fault) -> None:
    _kill(run, fault)
    _kill(run, Fault(fault.at_s, fault.kind, fault.other, fault.which, fault.duration_s))


def _freeze(run: ShardedRun, fault: Fault) -> None:
    if rank := _chosen(run, fault):
        rank.freeze()
        run.world.at(fault.duration_s, rank.thaw)


def _cut(run: ShardedRun, fault: Fault) -> None:
    alive: list[Process] = [*run.alive()]
    if len(alive) > 1:
        one = alive.pop(int(fault.which * len(alive)))
        ways = [(one, alive[int(fault.other * len(alive))])]
        run.network.cut.update(ways)
        run.world.at(fault.duration_s, run.network.heal, ways)


def _slow_down(run: ShardedRun, fault: Fault) -> None:
    run.world.slowness = 20.0
    run.world.at(fault.duration_s, setattr, run.world, "slowness", 1.0)


def _drain(run: ShardedRun, fault: Fault) -> None:
    if rank := _chosen(run, fault):
        run.driver.policy.drain(rank.seat, "drained", replace=fault.other < 0.5)


def _scale(run: ShardedRun, fault: Fault) -> None:
    run.driver.policy.scale(1 + int(8 * fault.which))


def _disk_full(run: ShardedRun, fault: Fault) -> None:
    run.disk_is_full = True
    run.world.at(fault.duration_s, setattr, run, "disk_is_full", False)


SHARD_FAULTS: dict[str, Callable[[ShardedRun, Fault], None]] = {
    one.__name__.lstrip("_"): one for one in (_kill, _kill_two, _freeze, _cut, _slow_down, _drain, _scale, _disk_full)
}
