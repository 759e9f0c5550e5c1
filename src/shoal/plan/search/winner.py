"""Which trial wins a search, and what is trained after its budget is used up."""

from __future__ import annotations

import numpy as np

from shoal.plan.search.ledger import Ledger, TrialState
from shoal.plan.search.pareto import fronts

BEST_FEW = 3
"""Trials that are repeated with other seeds."""
MAX_FRONT = 8
"""Trials of a Pareto front that are trained to their end."""


def best_trial(ledger: Ledger) -> TrialState | None:
    """The best trial by the mean over its seeds; with several metrics, the best of the front by the first metric."""
    found = front(ledger) if ledger.several else _eligible(ledger)
    whole = [t for t in found if t.status == "complete"] or found
    if not whole:
        return None
    means = [_mean_over_seeds(ledger, trial) for trial in whole]
    return whole[max(range(len(whole)), key=lambda i: (means[i], -whole[i].number))]


def unfinished_winners(ledger: Ledger) -> list[TrialState]:
    """Paused trials that would win now."""
    if ledger.several:
        return [t for t in front(ledger)[:MAX_FRONT] if t.status == "paused"]
    first = ledger.ranking(_eligible(ledger))[:1]
    return [t for t in first if t.status == "paused"]


def wanted_repeats(ledger: Ledger, repeat: int) -> list[tuple[int, int]]:
    """(trial, seed) for the best few, all first repetitions before all second ones."""
    whole = [t for t in _eligible(ledger) if t.status == "complete"]
    few = ledger.ranking(whole)[:BEST_FEW]
    return [(trial.number, ledger.job_seed + k) for k in range(1, repeat) for trial in few]


def front(ledger: Ledger) -> list[TrialState]:
    """The trials that no other one dominates, in the order of the first metric."""
    trials = _eligible(ledger)
    if not trials:
        return []
    values = np.array([ledger.values(trial) for trial in trials])
    return [trials[i] for i in sorted(fronts(values)[0], key=lambda i: (-values[i, 0], trials[i].number))]


def _eligible(ledger: Ledger) -> list[TrialState]:
    """Trials that can win: with a finite value, and within the constraints."""
    trials = [t for t in ledger.searched() if t.status != "failed" and np.isfinite(ledger.values(t)).all()]
    return [t for t in trials if ledger.violation(t) == 0]


def _mean_over_seeds(ledger: Ledger, trial: TrialState) -> float:
    group = [trial, *(t for t in ledger.trials if t.repeat_of == trial.number and t.status == "complete")]
    return float(np.mean([ledger.values(t)[0] for t in group]))
