"""What it costs to keep few checkpoints of paused trials: a forgotten one is trained again when it is promoted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.search.simulate import default_search
from benchmarks.search.tables import CurveTable
from benchmarks.search.workers import Carried, SimulatedFleet
from shoal.plan.search.standing import parts_ahead
from shoal.plan.search.trial import Stretch


@dataclass
class ForgettingFleet(SimulatedFleet):
    """Keeps the checkpoints of at most `most` paused trials, as the driver does: those that many others were ahead of
    at their unit are forgotten first."""

    most: int | None = None
    again: float = 0.0
    """Work that was done twice."""
    resumed: int = 0
    retrained: int = 0
    peak: int = 0
    stretches: list[Stretch] = field(default_factory=list)
    _paused: dict[int, int] = field(default_factory=dict)
    _scores: dict[int, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    _forgotten: set[int] = field(default_factory=set)

    def carry(self, stretch: Stretch) -> Carried:
        carried = super().carry(stretch)
        self.stretches.append(stretch)
        self._paused.pop(stretch.trial, None)
        self.resumed += stretch.start > 0
        if stretch.trial not in self._forgotten:
            return carried
        self._forgotten.remove(stretch.trial)
        since = float(self.table.time[int(stretch.changes["row"]), stretch.start - 1])
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
        self.peak = max(self.peak, len(self._paused))
        while self.most is not None and len(self._paused) > self.most:
            ahead = parts_ahead(self._paused, self._scores)
            worst = min(self._paused, key=lambda trial: (-ahead[trial], self._paused[trial]))
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
    part of all. `retrained`: promotions of forgotten trials, as a part of all. `same`: the decisions are those of a
    search that keeps all, as far as both came."""
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
                "retrained": round(float(np.mean([one.retrained / max(one.resumed, 1) for one in tight])), 4),
                "same": all(one == other for pair in pairs for one, other in pair),
                "runs": len(tight),
            }
        )
    return rows
