"""All trials in one order, although they were trained to different units."""

from __future__ import annotations

from collections.abc import Sequence

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
