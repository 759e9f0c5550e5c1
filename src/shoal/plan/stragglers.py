"""Which worker holds the others back."""

from __future__ import annotations

from collections.abc import Mapping


def slowest_worker(work_s: Mapping[str, float]) -> tuple[str, float] | None:
    """The worker that works longest for a step, and how much less the others need on average: 0.4 for 40 %. `work_s`
    are seconds of work per step. None unless two workers are known."""
    known = {name: spent_s for name, spent_s in work_s.items() if spent_s > 0}
    if len(known) < 2:
        return None
    name = max(known, key=lambda who: known[who])
    others = [spent_s for who, spent_s in known.items() if who != name]
    return name, max(1 - (sum(others) / len(others)) / known[name], 0.0)
