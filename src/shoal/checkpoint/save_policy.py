"""Decides when to save. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SaveInterval = tuple[Literal["auto", "steps", "seconds", "never"], float]

FIRST_SAVE_S = 2.0
"""Seconds before the first save of `auto`, which measures what a save costs."""
MIN_INTERVAL_S = 10.0
"""Minimum seconds between two saves of `auto`."""
RETRY_S = 10.0
"""Seconds after which a save that failed is tried again, however long the interval is. Ten times its cost, if more."""
TIME_BUDGET = 0.03
"""Share of the wall time that `auto` may spend on saving."""


@dataclass(frozen=True)
class SaveTiming:
    """Timing of saves, as known at the end of a step. Times are seconds.

    `cost_s` is the cost of the last save (None before the first) and `spent_s` the cost of all saves: the time for
    which training was blocked, plus the processor time that the background thread took from it. `busy`: a save is
    still being written. `failed`: the last save failed.
    """

    step: int
    last_step: int
    elapsed_s: float
    since_s: float
    cost_s: float | None = None
    spent_s: float = 0.0
    busy: bool = False
    failed: bool = False


def decide_save(interval: SaveInterval, timing: SaveTiming) -> Literal["save", "wait", "skip"]:
    """`skip`: a save is due, but the previous one is still being written."""
    unit, number = interval
    if unit == "never":
        return "wait"
    if timing.failed and not timing.busy and timing.since_s >= max(RETRY_S, 10 * (timing.cost_s or 0)):
        return "save"
    if unit == "auto":
        return "save" if not timing.busy and _affordable(timing) else "wait"
    if unit == "steps":
        length = max(1, int(number))
        due = timing.step // length > timing.last_step // length
    else:
        due = timing.since_s >= number
    if not due:
        return "wait"
    return "skip" if timing.busy else "save"


def _affordable(timing: SaveTiming) -> bool:
    if timing.cost_s is None:
        return timing.elapsed_s >= FIRST_SAVE_S
    return timing.since_s >= MIN_INTERVAL_S and timing.spent_s + timing.cost_s <= TIME_BUDGET * timing.elapsed_s
