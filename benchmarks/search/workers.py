"""Imaginary workers that carry the stretches of a search plan, as the driver gives them out."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from benchmarks.search.tables import CurveTable
from shoal.plan.search.trial import SearchEnd, SearchPlan, ShapeWanted, Stretch, StretchResult, TrialShape, Wait

SPEED_NOISE = 0.15
COST_ERROR = 0.25
HELP = 0.85
"""How much a worker that helps another one's stretch adds to its speed."""
LANES = 8
"""Workers that one trial can use."""


@dataclass
class Observations:
    """When which error was seen, and how long decisions took."""

    seen: list[tuple[float, float]] = field(default_factory=list)
    decisions_s: list[float] = field(default_factory=list)
    busy: float = 0.0
    trained: float = 0.0
    ended: float = 0.0

    def best_at(self, when: float) -> float:
        return min((error for t, error in self.seen if t <= when), default=np.inf)


@dataclass
class Carried:
    """A stretch on real workers: `marks` is the work until each of its epochs, `done` the work so far."""

    stretch: Stretch
    marks: np.ndarray
    errors: np.ndarray
    workers: int = 0
    done: float = 0.0

    @property
    def speed(self) -> float:
        return 1 + HELP * (self.workers - 1) if self.workers else 0.0


@dataclass
class SimulatedFleet:
    """`workers` workers; `horizon` ends the simulation. Idle workers join the stretch that is waited for, up to `lanes`
    in all, then the others in the order of their virtual ends. With one lane nobody helps."""

    table: CurveTable
    plan: SearchPlan
    workers: int
    horizon: float
    seed: int
    lanes: int = LANES
    speeds: float = SPEED_NOISE
    cost_error: float = COST_ERROR
    found: Observations = field(default_factory=Observations)
    now: float = 0.0
    _carried: dict[int, Carried] = field(default_factory=dict)

    def run(self) -> Observations:
        while self.now < self.horizon:
            waiting = self._decide()
            if isinstance(waiting, SearchEnd) and not self._carried:
                break
            self._assign(waiting)
            self._advance()
        self.found.ended = self.now
        return self.found

    def _decide(self) -> Wait | SearchEnd:
        while True:
            begun = time.process_time()
            decision = self.plan.decide()
            if not isinstance(decision, Wait):
                self.found.decisions_s.append(time.process_time() - begun)
            if isinstance(decision, ShapeWanted):
                self.plan.tell_shape(decision.trial, self._shape(int(decision.changes["row"])))
            elif isinstance(decision, Stretch):
                self._carried[decision.number] = self.carry(decision)
            else:
                return decision

    def _shape(self, row: int) -> TrialShape:
        noise = np.random.default_rng([row, 7]).normal() * self.cost_error
        return TrialShape(units=self.table.error.shape[1], cost=float(self.table.time[row, -1] * np.exp(noise)))

    def carry(self, stretch: Stretch) -> Carried:
        row = int(stretch.changes["row"])
        since = self.table.time[row, stretch.start - 1] if stretch.start else 0.0
        marks = self.table.time[row, stretch.start : stretch.end] - since
        factor = np.exp(np.random.default_rng([self.seed, stretch.number, row]).normal() * self.speeds)
        errors = self.table.error[row, stretch.start : stretch.end]
        alive = int(np.isfinite(errors).sum())
        kept = min(alive + 1, len(errors))  # it trains up to the epoch at which it diverges
        return Carried(stretch, np.maximum(marks[:kept] * factor, 1e-9), errors[:kept])

    def _assign(self, waiting: Wait | SearchEnd) -> None:
        free = self.workers - sum(c.workers for c in self._carried.values())
        in_order = sorted(self._carried.values(), key=lambda c: (c.stretch.ends, c.stretch.number))
        for carried in in_order:
            if free and not carried.workers:
                carried.workers, free = 1, free - 1
        awaited = waiting.number if isinstance(waiting, Wait) else None
        for carried in sorted(in_order, key=lambda c: c.stretch.number != awaited):
            extra = min(free, self.lanes - carried.workers)
            carried.workers, free = carried.workers + extra, free - extra

    def _advance(self) -> None:
        """Up to the next end of a stretch."""
        running = [c for c in self._carried.values() if c.workers]
        step = min((c.marks[-1] - c.done) / c.speed for c in running)
        for carried in running:
            self.found.busy += carried.workers * min(step, self.horizon - self.now)
            self._train(carried, step)
        self.now += step
        for carried in [c for c in running if c.done >= c.marks[-1] - 1e-12]:
            del self._carried[carried.stretch.number]
            self.release(carried)

    def _train(self, carried: Carried, step: float) -> None:
        reached = carried.done + carried.speed * step
        for mark, error in zip(carried.marks, carried.errors, strict=True):
            if carried.done < mark <= reached + 1e-12 and np.isfinite(error):
                self.found.seen.append((self.now + (mark - carried.done) / carried.speed, float(error)))
        self.found.trained += carried.speed * step
        carried.done = reached

    def release(self, carried: Carried) -> None:
        rows = tuple({"error": float(e)} for e in carried.errors if np.isfinite(e))
        failure = "" if len(rows) == len(carried.errors) else "diverged"
        self.plan.tell(carried.stretch.number, StretchResult(rows, failure))
