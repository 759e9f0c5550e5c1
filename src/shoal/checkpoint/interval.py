"""When to save: a decision, and no act."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Every = tuple[Literal["auto", "steps", "seconds", "never"], float]

FIRST_S = 2.0
"""`auto` saves first after this time: it shows what a save costs."""
AGAIN_S = 10.0
"""`auto` never saves twice within this time."""
BUDGET = 0.03
"""The part of the wall time that `auto` may spend on saving."""


@dataclass(frozen=True)
class Moment:
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


def decide(every: Every, now: Moment) -> Literal["save", "wait", "skip"]:
    """`skip`: it is time, but the last save is still being written."""
    unit, number = every
    if unit == "never":
        return "wait"
    if unit == "auto":
        return "save" if not now.busy and _affordable(now) else "wait"
    if unit == "steps":
        length = max(1, int(number))
        due = now.step // length > now.last_step // length
    else:
        due = now.since_s >= number
    if not due:
        return "wait"
    return "skip" if now.busy else "save"


def _affordable(now: Moment) -> bool:
    if now.cost_s is None:
        return now.elapsed_s >= FIRST_S
    return now.since_s >= AGAIN_S and now.spent_s + now.cost_s <= BUDGET * now.elapsed_s
