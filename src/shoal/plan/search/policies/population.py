"""Population based training: at a milestone, a bad member becomes a copy of a good one with changed values.

A member is a line of trials: each copy is a new trial that begins with the state of another one. A milestone is judged
among the members that have passed it in virtual time, those that pass it at the same time too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shoal.plan.search.ledger import Ledger, TrialState
from shoal.plan.search.policies.base import Begin, Choice, Continue, Nothing
from shoal.plan.search.space import Point
from shoal.spec.search.space import Range

MILESTONES = 10
MOST_FAILURES = 5
"""Failed trials of one member, after which it is given up."""


@dataclass(frozen=True)
class Population:
    """`size` members, or as many as the space has configurations; the worst `quantile` at a milestone
    copies one of the best `quantile`."""

    size: int = 8
    every: int | Literal["auto"] = "auto"
    quantile: float = 0.25
    perturb: float = 1.25
    resample: float = 0.25

    def decide(self, ledger: Ledger, *, may_begin: bool) -> Choice:
        lines = _lines(ledger)
        if len(lines) < self.size and may_begin and not ledger.used_up:
            return Begin(group=len(lines))
        waiting = [line[-1] for line in lines.values() if line[-1].status in ("paused", "failed")]
        for trial in sorted(waiting, key=lambda t: (t.until, t.number)):
            choice = self._next(ledger, lines, trial, may_begin)
            if choice is not None:
                return choice
        return Nothing("the population is trained")

    def first_end(self, ledger: Ledger, trial: TrialState) -> int:
        return self._milestone_after(trial)

    def earliest_copy(self, ledger: Ledger) -> int:
        """No state before this unit will be copied any more. A member whose trial fails begins again where that trial
        began, so a member that was never replaced may need every state until it is complete."""
        lines = _lines(ledger)
        if len(lines) < self.size and not ledger.used_up:
            return 0
        wanted = [line[-1].origin for line in lines.values() if line[-1].status != "complete"]
        return min(wanted, default=max((t.shape.units for t in ledger.trials), default=0))

    def _milestone_after(self, trial: TrialState) -> int:
        every = max(1, trial.shape.units // MILESTONES) if self.every == "auto" else self.every
        return min((trial.until // every + 1) * every, trial.shape.units)

    def _next(
        self, ledger: Ledger, lines: dict[int, list[TrialState]], trial: TrialState, may_begin: bool
    ) -> Begin | Continue | None:
        failed = trial.status == "failed"
        if failed and sum(t.status == "failed" for t in lines[trial.group]) > MOST_FAILURES:
            return None
        at = trial.origin if failed else trial.until
        donor = self._donor(ledger, lines, trial, at) if may_begin else None
        if donor is not None:
            point = self._explore(ledger, donor.point)
            return Begin(trial.group, point, (donor.number, at), f"copy of trial {donor.number} at {at}")
        if failed:
            return Begin(group=trial.group) if may_begin and at == 0 and not ledger.used_up else None
        return Continue(trial.number, self._milestone_after(trial))

    def _donor(
        self, ledger: Ledger, lines: dict[int, list[TrialState]], trial: TrialState, at: int
    ) -> TrialState | None:
        """One of the best at this milestone, if the trial is among the worst there, or failed."""
        there = [t for line in lines.values() for t in line if t.origin < at <= t.reached]
        latest = {t.group: t for t in there}  # a later trial of a member replaces an earlier one
        ranked = ledger.ranking(latest.values(), at)
        few = max(int(self.quantile * len(ranked)), 1) if len(ranked) * self.quantile >= 1 else 0
        bad = trial.status == "failed" or trial in ranked[len(ranked) - few :]
        good = [t for t in ranked[:few] if t.group != trial.group and t.status != "failed"]
        if not bad or not good:
            return None
        return good[int(ledger.generator(9, len(ledger.trials)).integers(len(good)))]

    def _explore(self, ledger: Ledger, point: Point) -> Point:
        """Each value drawn anew, or moved up or down."""
        generator = ledger.generator(10, len(ledger.trials))
        cube = np.array(point.cube)
        fresh, up = generator.random(len(cube)), generator.random(len(cube)) < 0.5
        anew = generator.random(len(cube)) < self.resample
        for i, axis in enumerate(ledger.space.axes):
            moved = cube[i] + (1 if up[i] else -1) * self._step(axis.values, float(cube[i]))
            cube[i] = fresh[i] if anew[i] else min(max(moved, 0.0), 1.0)
        settled = ledger.space.settle(cube)
        assert settled is not None
        return settled

    def _step(self, values: object, place: float) -> float:
        """How far in the unit interval a factor of `perturb` is; one option for a choice with an order."""
        if not isinstance(values, Range):
            return 1 / len(getattr(values, "options", (0,))) if getattr(values, "ordered", False) else 0.0
        if values.log:
            return math.log(self.perturb) / math.log(values.high / values.low)
        number = values.low + place * (values.high - values.low)
        return abs(number) * (self.perturb - 1) / (values.high - values.low)


def last_of_lines(ledger: Ledger) -> set[int]:
    """The trials that members train now; others are never continued."""
    return {line[-1].number for line in _lines(ledger).values()}


def _lines(ledger: Ledger) -> dict[int, list[TrialState]]:
    lines: dict[int, list[TrialState]] = {}
    for trial in ledger.searched():
        lines.setdefault(trial.group, []).append(trial)
    return lines
