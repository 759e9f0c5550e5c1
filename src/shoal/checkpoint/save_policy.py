"""When to save: a decision, and no act."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SaveInterval = tuple[Literal["auto", "steps", "seconds", "never"], float]

FIRST_SAVE_S = 2.0
"""`auto` saves first after this time: it shows what a save costs."""
MIN_INTERVAL_S = 10.0
"""`auto` never saves twice within this time."""
TIME_BUDGET = 0.03
"""The part of the wall time that `auto` may spend on saving."""


@dataclass(frozen=True)
class SaveTiming:
    """What is known at the end of a step. Times are seconds.

    `cost_s` is what the last save cost (None before the first), `spent_s` what all of them did: the time that
    training stood still, and the processor time that was taken from it in the background. `busy`: a save is
    still being written.
    """

    step: int
    last_step: int
    elapsed_s: float
    since_s: float
    cost_s: float | None = None
    spent_s: float = 0.0
    busy: bool = False


def decide_save(interval: SaveInterval, timing: SaveTiming) -> Literal["save", "wait", "skip"]:
    """`skip`: it is time, but the last save is still being written."""
    unit, number = interval
    if unit == "never":
        return "wait"
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
