"""The rungs at which trials are compared."""

from __future__ import annotations

MOST_RUNGS = 6
"""Rungs of a ladder: the lowest of a long training is not at its very first evaluation."""
FIRST_SHARE = 0.06
"""The first rung as a part of the whole training. Earlier, slow learners that end well look bad: the model would
propose them, and the rung would stop them. Later, there are too few trials."""


def auto_first(units: int) -> int:
    return max(1, round(FIRST_SHARE * units))


def rungs(units: int, *, first: int, factor: int) -> list[int]:
    """Units at which a training of this length may pause; the last one is its end."""
    levels, level = [units], first
    while level < units / 1.5:
        levels.append(level)
        level *= factor
    return sorted(levels)[-MOST_RUNGS:]
