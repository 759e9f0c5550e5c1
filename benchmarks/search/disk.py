"""What it costs to keep few checkpoints of paused trials: a forgotten one is trained again when it is promoted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_array

from benchmarks.search.simulate import default_search
from benchmarks.search.tables import CurveTable
from benchmarks.search.workers import Carried, SimulatedFleet
from shoal.plan.search.standing import worth_keeping
from shoal.plan.search.trial import Stretch


@dataclass
class Pause:
    """A trial that rests, with what it has cost so far. `number` counts the pauses of a search; `resumed`: how many
    there were when it went on, None if it never did."""

    number: int
    cost: float
    resumed: int | None = None


def least_again(pauses: Sequence[Pause], most: int) -> float:
    """The work that is done twice at least with room for `most` checkpoints: by one who knows the future."""
    kept = [one for one in pauses if one.resumed is not None]
    during = [[one.number <= when < (one.resumed or 0) for one in kept] for when in range(len(pauses))]
    found = linprog([-one.cost for one in kept], A_ub=csr_array(during), b_ub=[most] * len(pauses), bounds=(0, 1))
    return float(sum(one.cost for one in kept) + found.fun)


@dataclass
class ForgettingFleet(SimulatedFleet):
    """Keeps the checkpoints of at most `most` paused trials, as the driver does."""

    most: int | None = None
    again: float = 0.0
    """Work that was done twice."""
    resumed: int = 0
    retrained: int = 0
    peak: int = 0
    stretches: list[Stretch] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    _costs: dict[int, float] = field(default_factory=dict)
    _paused: dict[int, int] = field(default_factory=dict)
    _scores: dict[int, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    _forgotten: set[int] = field(default_factory=set)
    _open: dict[int, Pause] = field(default_factory=dict)

    def carry(self, stretch: Stretch) -> Carried:
        carried = super().carry(stretch)
        self.stretches.append(stretch)
        if stretch.start == 0:
            return carried
        self._paused.pop(stretch.trial, None)
        self._open.pop(stretch.trial).resumed = len(self.pauses)
        self.resumed += 1
        if stretch.trial not in self._forgotten:
            return carried
        self._forgotten.remove(stretch.trial)
        since = self._costs[stretch.trial]
        self.again += since
        self.retrained += 1
        return replace(carried, marks=carried.marks + since)

    def release(self, carried: Carried) -> None:
        super().release(carried)
        stretch = carried.stretch
        best = self._scores[stretch.start].get(stretch.trial, -np.inf)
        for unit, error in enumerate(carried.errors, start=stretch.start + 1):
            if np.isfinite(error):
                best = max(best, -float(error))
                self._scores[unit][stretch.trial] = best
        if np.isfinite(carried.errors).all() and stretch.end < self.table.error.shape[1]:
            self._paused[stretch.trial] = stretch.end
            self._costs[stretch.trial] = float(self.table.time[int(stretch.changes["row"]), stretch.end - 1])
            self._open[stretch.trial] = Pause(len(self.pauses), self._costs[stretch.trial])
            self.pauses.append(self._open[stretch.trial])
        self.peak = max(self.peak, len(self._paused))
        while self.most is not None and len(self._paused) > self.most:
            costs = {trial: self._costs[trial] for trial in self._paused}
            worth = worth_keeping(self._paused, self._scores, costs)
            worst = min(self._paused, key=lambda trial: worth[trial])
            del self._paused[worst]
            self._forgotten.add(worst)


def run_once(t: CurveTable, *, workers: int, seed: int, horizon: float, most: int | None) -> ForgettingFleet:
    plan = default_search(t, slots=workers, order="virtual", seed=seed)
    fleet = ForgettingFleet(t, plan, workers, horizon, seed, most=most)
    fleet.run()
    return fleet


def disk(
    tables: Sequence[CurveTable], *, shares: Sequence[float], workers: int, seeds: int, horizon: float
) -> list[dict[str, Any]]:
    """One row per share. `kept`: checkpoints, the mean over the searches. `more work`: work that was done twice, as a
    part of all. `at least`: the same for one who knows the future. `retrained`: promotions of forgotten trials, as a
    part of all. `same`: the decisions are those of a search that keeps all, as far as both came."""
    named = [(t, seed) for t in tables for seed in range(seeds)]
    whole = [run_once(t, workers=workers, seed=s, horizon=horizon, most=None) for t, s in named]
    rows = []
    for share in shares:
        kept = [max(1, round(share * one.peak)) for one in whole]
        tight = [
            run_once(t, workers=workers, seed=s, horizon=horizon, most=n) for (t, s), n in zip(named, kept, strict=True)
        ]
        pairs = [zip(a.stretches, b.stretches, strict=False) for a, b in zip(whole, tight, strict=True)]
        rows.append(
            {
                "share": share,
                "kept": round(float(np.mean(kept)), 1),
                "more work": round(float(np.mean([one.again / one.found.trained for one in tight])), 4),
                "at least": round(float(np.mean(list(map(_least_share, whole, kept)))), 4),
                "retrained": round(float(np.mean([one.retrained / max(one.resumed, 1) for one in tight])), 4),
                "same": all(one == other for pair in pairs for one, other in pair),
                "runs": len(tight),
            }
        )
    return rows


def _least_share(one: ForgettingFleet, most: int) -> float:
    again = least_again(one.pauses, most)
    return again / (one.found.trained + again)
