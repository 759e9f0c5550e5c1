"""Has a run moved away from what was expected of it? Slowly to anger: a window of steps, and rests that grow."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

OFF = 1.5
"""So many times as long, or as short, as expected is another thing than expected."""

WINDOW, FEW_ROUNDS = 20, 3
"""So many rows of steps are looked at; where workers agree now and then, so many agreements."""

REST_STEPS, MOST_DOUBLINGS = 100, 6
"""So many steps at least lie between two looks that lead to something; twice as many after each."""


def window(period: int) -> int:
    return WINDOW if period == 1 else FEW_ROUNDS


def moved(expected_s: float, taken: Sequence[float], *, period: int = 1) -> float | None:
    """What a step typically takes by now, if that is far from what was expected; None if it is not, or not known."""
    wanted = window(period)
    if len(taken) < wanted or expected_s <= 0:
        return None
    typical = median(taken[-wanted:])
    return None if expected_s / OFF <= typical <= expected_s * OFF else typical


def rested(steps: int, looks: int) -> bool:
    """Have there been enough steps since the last of so many looks?"""
    return steps >= REST_STEPS << min(looks, MOST_DOUBLINGS)
