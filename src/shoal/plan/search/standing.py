"""All trials in one order, although they were trained to different units."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from shoal.plan.search.ledger import Ledger, TrialState

DECAY = 8.0
"""How fast a promotion becomes less likely the more trials were better. In simulated searches 4 was worse, and 16 too
except with the smallest room."""


def standing(ledger: Ledger, trials: Sequence[TrialState]) -> list[TrialState]:
    """Best first: those that were trained further come first, because they were better where others stopped.

    Failed trials come last.
    """
    alive = [t for t in trials if t.status != "failed" and t.rows]
    found: list[TrialState] = []
    for level in sorted({t.reached for t in alive}, reverse=True):
        found += ledger.ranking([t for t in alive if t.reached == level], level)
    seen = {t.number for t in found}
    return found + [t for t in trials if t.number not in seen]


def worth_keeping(
    paused: Mapping[int, int], scores: Mapping[int, Mapping[int, float]], costs: Mapping[int, float]
) -> dict[int, float]:
    """For each paused trial, by number with its unit: what it would cost to train it again so far (`costs`), as far as
    it is likely to be promoted. `scores`: by unit and trial, larger is better."""
    there = {unit: sorted(scores[unit].values()) for unit in set(paused.values())}

    def part_ahead(trial: int, unit: int) -> float:
        return 1 - bisect_right(there[unit], scores[unit][trial]) / len(there[unit])

    return {trial: costs[trial] * math.exp(-DECAY * part_ahead(trial, unit)) for trial, unit in paused.items()}
