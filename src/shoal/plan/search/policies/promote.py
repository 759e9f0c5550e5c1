"""Promotion in rungs (ASHA with pause): a trial is trained further when it is among the best at its rung.

A model proposes better and better trials. If each of them went on because it is better than the earlier ones, few would
be compared with each other: so a rung lets no more go than its share of the trials that reached it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.plan.search.ledger import Ledger, TrialState
from shoal.plan.search.policies.base import Begin, Choice, Continue, Nothing
from shoal.plan.search.rungs import auto_first, rungs


@dataclass(frozen=True)
class Promote:
    """At each rung the best one in `factor` of the trials that reached it goes on to the next one. When that many have
    gone on, only a trial that is better there than all others does.

    `brackets` above 1 is Hyperband: a trial of bracket b begins at rung b. Brackets do not meet.
    """

    first: int | Literal["auto"] = "auto"
    factor: int = 2
    brackets: int = 1

    def decide(self, ledger: Ledger, *, may_begin: bool) -> Choice:
        trials = [t for t in ledger.searched() if t.rows and t.shape.units]
        groups = sorted({t.group for t in trials}) if self.brackets > 1 else [None]
        for group in groups:
            promoted = self._promotion(ledger, [t for t in trials if group in (None, t.group)])
            if promoted is not None:
                return promoted
        if not may_begin:
            return Nothing("the number of trials is reached")
        return Begin(group=self._bracket(len(ledger.trials)))

    def first_end(self, ledger: Ledger, trial: TrialState) -> int:
        ladder = self.ladder(trial.shape.units)
        return ladder[min(trial.group, len(ladder) - 1)] if self.brackets > 1 else ladder[0]

    def ladder(self, units: int) -> list[int]:
        first = auto_first(units) if self.first == "auto" else self.first
        return rungs(units, first=first, factor=self.factor)

    def _promotion(self, ledger: Ledger, trials: list[TrialState]) -> Continue | None:
        """The best trial that may go on, from the highest rung downwards."""
        levels = sorted({level for t in trials for level in self.ladder(t.shape.units)}, reverse=True)
        for level in levels:
            there = [t for t in trials if t.reached >= min(level, t.shape.units)]
            for trial in ledger.ranking(there, level)[: self._places(there, level)]:
                if trial.status == "paused" and trial.until == level:
                    ladder = self.ladder(trial.shape.units)
                    end = next(rung for rung in ladder if rung > level)
                    return Continue(trial.number, end, f"among the best at {level}")
        return None

    def _places(self, there: list[TrialState], level: int) -> int:
        """How many of the best at a rung may go on now."""
        share = len(there) // self.factor
        gone = sum(t.until > level for t in there)
        return share if gone < share else min(share, 1)

    def _bracket(self, number: int) -> int:
        """Brackets take turns; those that begin lower get `factor` times as many trials as the next one."""
        if self.brackets == 1:
            return 0
        weights: list[int] = [self.factor ** (self.brackets - 1 - b) for b in range(self.brackets)]
        place = number % sum(weights)
        for bracket, weight in reversed(list(enumerate(weights))):
            if place < weight:
                return bracket
            place -= weight
        return 0
