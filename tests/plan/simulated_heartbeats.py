"""Simulated workers that train in step, with their heartbeats; freezes and hangs can be put in."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from shoal.plan.failure_detector import DetectedFailure, FailureDetector, Heartbeat

OWN_WORK_PHASES = ("compute", "data", "evaluation")
WorkUnit = tuple[str, float]
"""A phase, and how long the worker is busy in it."""


def training_schedule(
    lane_s: float, *, lanes: int = 2, first_batch_s: float = 0.0, evaluation: tuple[float, float] | None = None
) -> Iterator[WorkUnit]:
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
class HeartbeatWorker:
    seat: int
    schedule: Iterator[WorkUnit]
    local: bool = False
    phase: str = "building"
    remaining_s: float = 0.0
    since_s: float = 0.0
    units_done: int = 0
    units_by_phase: Counter[str] = field(default_factory=Counter)
    step: int = 0
    next_heartbeat_s: float = 0.0
    silent_s: float = 0.0
    paused_s: float = 0.0
    hung: bool = False
    frozen: bool = False
    last_heartbeat: Heartbeat | None = None

    def begin_unit(self) -> None:
        self.phase, self.remaining_s = next(self.schedule)
        self.since_s = 0.0

    def finish_unit(self) -> None:
        self.units_done += 1
        self.units_by_phase[self.phase] += 1
        if self.phase == "exchange":
            self.step += 1
        self.begin_unit()

    def advance(self, dt: float) -> None:
        self.silent_s += dt
        if self.frozen:
            return
        self.since_s += dt
        if self.paused_s > 0:
            self.paused_s -= dt
            return
        self.remaining_s -= dt
        if self.phase != "exchange" and self.remaining_s <= 0 and not self.hung:
            self.finish_unit()
        self.next_heartbeat_s -= dt
        if self.next_heartbeat_s <= 0:
            self.next_heartbeat_s, self.silent_s = 0.25, 0.0
            self.last_heartbeat = self.heartbeat()

    def heartbeat(self) -> Heartbeat:
        done = self.units_by_phase[self.phase]
        return Heartbeat(
            self.seat, 0.0, False, self.phase, self.units_done, self.since_s, self.step, "model.py:12 in f", done
        )

    @property
    def is_calibrated(self) -> bool:
        """In a unit of own work of which it has done a few."""
        return self.phase in OWN_WORK_PHASES and self.units_by_phase[self.phase] >= 3


class HeartbeatSimulation:
    def __init__(self, plans: list[Iterator[WorkUnit]], rng: random.Random) -> None:
        self.rng = rng
        self.workers = [HeartbeatWorker(seat, plan, local=rng.random() < 0.5) for seat, plan in enumerate(plans)]
        for worker in self.workers:
            worker.begin_unit()
            worker.next_heartbeat_s = rng.uniform(0, 0.25)
            worker.last_heartbeat = worker.heartbeat()
        self.now_s = 0.0
        self.detector = FailureDetector()

    def heartbeats(self) -> list[Heartbeat]:
        return [self._heartbeat_of(worker) for worker in self.workers]

    def _heartbeat_of(self, worker: HeartbeatWorker) -> Heartbeat:
        beat = worker.last_heartbeat
        assert beat is not None
        stopped = worker.frozen and worker.local
        return Heartbeat(worker.seat, worker.silent_s, stopped, *list(vars(beat).values())[3:])

    def tick(self) -> list[DetectedFailure]:
        dt = self.rng.uniform(0.02, 0.1)
        self.now_s += dt
        for worker in self.workers:
            worker.advance(dt)
        if all(worker.phase == "exchange" and worker.since_s > 0.05 and not worker.frozen for worker in self.workers):
            for worker in self.workers:
                worker.finish_unit()
        return self.detector.check(self.now_s, self.heartbeats())

    def run(self, for_s: float, *, until: Callable[[], bool] = lambda: False) -> list[DetectedFailure]:
        """The first verdicts; none if there was no reason for so long, or until it was so."""
        end_s = self.now_s + for_s
        while self.now_s < end_s and not until():
            if verdicts := self.tick():
                return verdicts
            assert not self.detector.stalled
        return []
