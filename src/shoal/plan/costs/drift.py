"""Has a run moved away from what was expected of it? Slowly to anger: a window of steps, and rests that grow."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

DRIFT_FACTOR = 1.5
"""So many times as long, or as short, as expected is another thing than expected."""

WINDOW, FEWEST_ROWS, LONG_S = 20, 5, 10.0
"""So many rows of steps are looked at; where they take as long as this together, a few are enough."""

COOLDOWN_STEPS, MOST_DOUBLINGS = 100, 6
"""So many steps, or as long as that, lie between two looks that lead to something; twice as many after each."""


def typical_step_s(taken: Sequence[tuple[int, float]]) -> float | None:
    """What a step takes by the newest of these rows (steps, seconds); None if they are too few to say."""
    newest = [row for row in taken if row[0]][-WINDOW:]
    if len(newest) < WINDOW and (len(newest) < FEWEST_ROWS or sum(seconds for _, seconds in newest) < LONG_S):
        return None
    return median(seconds / steps for steps, seconds in newest)


def has_drifted(expected_s: float, measured_s: float) -> bool:
    """Is it far from what was expected?"""
    return not expected_s / DRIFT_FACTOR <= measured_s <= expected_s * DRIFT_FACTOR


def cooldown_over(steps: int, seconds: float, replans: int) -> bool:
    """Has there been enough since the last of so many looks?"""
    times = 1 << min(replans, MOST_DOUBLINGS)
    return steps >= times * COOLDOWN_STEPS or seconds >= times * LONG_S
