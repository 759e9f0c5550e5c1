"""All trials in one order, although they were trained to different units."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from shoal.plan.search.ledger import Ledger, TrialState


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


def parts_ahead(paused: Mapping[int, int], scores: Mapping[int, Mapping[int, float]]) -> dict[int, float]:
    """For each paused trial, by number with its unit: the part of the trials that came as far and were better there.
    The smaller it is, the sooner the trial is promoted. `scores`: by unit and trial, larger is better."""
    there = {unit: sorted(scores[unit].values()) for unit in set(paused.values())}
    return {
        trial: 1 - bisect_right(there[unit], scores[unit][trial]) / len(there[unit]) for trial, unit in paused.items()
    }
