"""A crew of simulated workers that train in step, with their beats; freezes and hangs can be put in."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from shoal.plan.suspicion import Sign, Suspicion, Verdict

OWN = ("compute", "data", "evaluation")
Unit = tuple[str, float]
"""A phase, and how long the worker is busy in it."""


def training(
    lane_s: float, *, lanes: int = 2, first_batch_s: float = 0.0, evaluation: tuple[float, float] | None = None
) -> Iterator[Unit]:
    """What a worker does: build, then steps of data, lanes and an exchange; now and then it evaluates."""
    yield "building", 0.5
    step = 0
    while True:
        yield "data", lane_s / 4 if step else max(first_batch_s, lane_s / 4)
        for _ in range(lanes):
            yield "compute", lane_s
        yield "exchange", 0.0
        step += 1
        if evaluation and step % 4 == 0:
            chunk_s, total_s = evaluation
            for _ in range(round(total_s / chunk_s)):
                yield "evaluation", chunk_s
            yield "exchange", 0.0


@dataclass
class Worker:
    seat: int
    plan: Iterator[Unit]
    local: bool = False
    phase: str = "building"
    left_s: float = 0.0
    since_s: float = 0.0
    units: int = 0
    in_phase: Counter[str] = field(default_factory=Counter)
    step: int = 0
    beat_in_s: float = 0.0
    heard_s: float = 0.0
    paused_s: float = 0.0
    hangs: bool = False
    frozen: bool = False
    last: Sign | None = None

    def begin(self) -> None:
        self.phase, self.left_s = next(self.plan)
        self.since_s = 0.0

    def finish(self) -> None:
        self.units += 1
        self.in_phase[self.phase] += 1
        if self.phase == "exchange":
            self.step += 1
        self.begin()

    def live(self, dt: float) -> None:
        self.heard_s += dt
        if self.frozen:
            return
        self.since_s += dt
        if self.paused_s > 0:
            self.paused_s -= dt
            return
        self.left_s -= dt
        if self.phase != "exchange" and self.left_s <= 0 and not self.hangs:
            self.finish()
        self.beat_in_s -= dt
        if self.beat_in_s <= 0:
            self.beat_in_s, self.heard_s = 0.25, 0.0
            self.last = self.beat()

    def beat(self) -> Sign:
        done = self.in_phase[self.phase]
        return Sign(self.seat, 0.0, False, self.phase, self.units, self.since_s, self.step, "model.py:12 in f", done)

    @property
    def settled(self) -> bool:
        """In a unit of own work of which it has done a few."""
        return self.phase in OWN and self.in_phase[self.phase] >= 3


class Crew:
    def __init__(self, plans: list[Iterator[Unit]], rng: random.Random) -> None:
        self.rng = rng
        self.workers = [Worker(seat, plan, local=rng.random() < 0.5) for seat, plan in enumerate(plans)]
        for worker in self.workers:
            worker.begin()
            worker.beat_in_s = rng.uniform(0, 0.25)
            worker.last = worker.beat()
        self.now_s = 0.0
        self.suspicion = Suspicion()

    def signs(self) -> list[Sign]:
        return [self._sign(worker) for worker in self.workers]

    def _sign(self, worker: Worker) -> Sign:
        beat = worker.last
        assert beat is not None
        stopped = worker.frozen and worker.local
        return Sign(worker.seat, worker.heard_s, stopped, *list(vars(beat).values())[3:])

    def tick(self) -> list[Verdict]:
        dt = self.rng.uniform(0.02, 0.1)
        self.now_s += dt
        for worker in self.workers:
            worker.live(dt)
        if all(worker.phase == "exchange" and worker.since_s > 0.05 and not worker.frozen for worker in self.workers):
            for worker in self.workers:
                worker.finish()
        return self.suspicion.look(self.now_s, self.signs())

    def run(self, for_s: float, *, until: Callable[[], bool] = lambda: False) -> list[Verdict]:
        """The first verdicts; none if there was no reason for so long, or until it was so."""
        end_s = self.now_s + for_s
        while self.now_s < end_s and not until():
            if verdicts := self.tick():
                return verdicts
            assert not self.suspicion.stuck
        return []
