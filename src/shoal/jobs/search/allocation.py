"""Which stretches run now, and with how many workers. No I/O. Real time decides who helps, never what is decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HELP_AFTER_S = 0.5
"""A stretch must have been under way for so long before others help it: then its speed is known."""
HELP_FOR_S = 2.0
"""Seconds that a stretch must still last to be worth a helper: starting one takes some tenths of a second."""


@dataclass(frozen=True)
class Work:
    """A stretch that has no result yet. `order` sorts by virtual end. `needs`: workers of one replica; it can use up to
    `most`. `left_s`: seconds that it will last with its present workers, None if that is unknown. `releasing`: its
    workers are exiting."""

    number: int
    order: tuple[float, int]
    needs: int = 1
    most: int = 1
    active: bool = False
    releasing: bool = False
    left_s: float | None = None


def allocate(works: Sequence[Work], *, workers: int, awaited: int | None) -> dict[int, int]:
    """Workers by stretch. Active stretches keep theirs; then those with the earliest virtual end begin; idle workers
    help the awaited one, then the others in their order. If there are fewer workers than before, the active ones with
    the latest virtual end get none."""
    held = sorted((w for w in works if w.active and not w.releasing), key=lambda w: w.order)
    waiting = sorted((w for w in works if not w.active), key=lambda w: w.order)
    given: dict[int, int] = {}
    free = workers
    for work in [*held, *waiting]:
        if work.needs <= free:
            given[work.number] = work.needs
            free -= work.needs
    if any(work.number not in given for work in waiting):
        return given
    running = [work for work in held if work.number in given and work.needs == 1]
    for work in sorted(running, key=lambda w: (w.number != awaited, w.order)):
        if free > 0 and work.left_s is not None and work.left_s > HELP_FOR_S:
            extra = min(free, work.most - 1)
            given[work.number] += extra
            free -= extra
    return given
