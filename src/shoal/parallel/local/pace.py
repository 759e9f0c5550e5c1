"""When lanes agree: a pure function of the step number, so that everybody means the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Leg:
    """Inner steps from `start` to `stop`; then one fragment arrives, if any, and one leaves."""

    start: int
    stop: int
    arrives: int | None = None
    leaves: int | None = None


@dataclass(frozen=True)
class Pace:
    """A round is `every` steps, a period `settle` rounds. At the end of a period all lanes agree on everything, and
    wait for it. In between, from the second round on, fragments leave one after the other while lanes go on; each
    arrives when the next leaves."""

    every: int = 1
    settle: int = 1

    @property
    def period(self) -> int:
        return self.every * self.settle

    def after(self, step: int, *, steps: int) -> int:
        """The agreement that follows one, in a run of so many steps."""
        return min((step // self.period + 1) * self.period, steps)

    def crosses(self, step: int, mark: int) -> bool:
        """Has there been a multiple of `mark` since the agreement before this one?"""
        before = (step - 1) // self.period * self.period
        return step > 0 and step // mark > before // mark

    def legs(self, start: int, stop: int, *, fragments: int) -> list[Leg]:
        """From one agreement to the next. What could not arrive before the end does not leave."""
        gap = max(self.every // fragments, 1)
        leaving = {
            at: i
            for first in range(start + self.every, stop, self.every)
            for i in range(min(fragments, self.every))
            if (at := first + i * gap) + gap < stop
        }
        arriving = {at + gap: i for at, i in leaving.items()}
        marks = sorted({start, stop} | leaving.keys() | arriving.keys())
        return [Leg(a, b, arriving.get(b), leaving.get(b)) for a, b in pairwise(marks)]


def fragments_of(sizes: Sequence[int], most: int) -> list[range]:
    """Runs of neighbours of about the same size: at most so many, and none of them empty."""
    total, done, starts = sum(sizes), 0, list[int]()
    for i, size in enumerate(sizes):
        if done * most >= len(starts) * total:
            starts.append(i)
        done += size
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(sizes)], strict=True)]
