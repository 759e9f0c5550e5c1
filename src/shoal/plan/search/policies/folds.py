"""A search over jobs with folds: a trial trains fold after fold, until it is clearly worse than the best one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.plan.search.ledger import Ledger, TrialState
from shoal.plan.search.policies.base import Begin, Choice, Continue, Nothing

WORSE_WITH = 0.1
"""A trial stops when a paired t-test gives at most this probability to its being as good as the best one."""


@dataclass(frozen=True)
class FoldRace:
    """A new trial trains `first` folds; then one fold at a time. With several metrics no trial stops early."""

    first: int = 2

    def decide(self, ledger: Ledger, *, may_begin: bool) -> Choice:
        leader = _leader(ledger)
        for trial in ledger.searched():
            if trial.status == "paused" and not (leader and is_worse(ledger, trial, leader)):
                return Continue(trial.number, trial.until + 1, "not clearly worse than the best")
        return Begin() if may_begin else Nothing("the number of trials is reached")

    def first_end(self, ledger: Ledger, trial: TrialState) -> int:
        return min(self.first, trial.shape.units)


def is_worse(ledger: Ledger, trial: TrialState, leader: TrialState) -> bool:
    """A one-sided paired t-test over the folds that both have trained."""
    from scipy.special import stdtr

    if ledger.several:
        return False
    goal = ledger.objectives[0]
    pairs = zip(trial.rows, leader.rows, strict=False)
    gaps = [goal.sign * (a.get(goal.metric, math.nan) - b.get(goal.metric, math.nan)) for a, b in pairs]
    if len(gaps) < 2 or not all(map(math.isfinite, gaps)):
        return any(not math.isfinite(gap) for gap in gaps)
    largest = max(map(abs, gaps)) or 1.0  # their squares may be larger than any float
    gaps = [gap / largest for gap in gaps]
    mean = math.fsum(gaps) / len(gaps)
    spread = math.sqrt(math.fsum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1) / len(gaps))
    if spread == 0:
        return mean < 0
    return float(stdtr(len(gaps) - 1, mean / spread)) < WORSE_WITH


def _leader(ledger: Ledger) -> TrialState | None:
    whole = [t for t in ledger.searched() if t.status == "complete" and ledger.violation(t) == 0]
    return ledger.ranking(whole)[0] if whole else None
