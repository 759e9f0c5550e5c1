"""When lanes sync: a pure function of the step number, so that all workers agree on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Segment:
    """Inner steps from `start` to `stop`. Then at most one fragment arrives, and at most one leaves."""

    start: int
    stop: int
    arriving_fragment: int | None = None
    leaving_fragment: int | None = None


@dataclass(frozen=True)
class SyncSchedule:
    """A round is `steps_per_round` steps, a period `rounds_per_sync` rounds. At the end of a period all lanes sync all
    parameters, and wait for it. In between, from the second round on, fragments leave one after the other while lanes
    compute; each arrives when the next one leaves."""

    steps_per_round: int = 1
    rounds_per_sync: int = 1

    @property
    def steps_per_sync(self) -> int:
        return self.steps_per_round * self.rounds_per_sync

    def next_sync(self, step: int, *, steps: int) -> int:
        """The step of the sync that follows `step`, in a run of `steps` steps."""
        return min((step // self.steps_per_sync + 1) * self.steps_per_sync, steps)

    def crossed_multiple_of(self, step: int, interval: int) -> bool:
        """Has there been a multiple of `interval` since the sync before this one?"""
        before = (step - 1) // self.steps_per_sync * self.steps_per_sync
        return step > 0 and step // interval > before // interval

    def segments(self, start: int, stop: int, *, fragments: int) -> list[Segment]:
        """The segments from one sync to the next. A fragment that could not arrive before the end does not leave."""
        gap = max(self.steps_per_round // fragments, 1)
        leaving = {
            at: i
            for first in range(start + self.steps_per_round, stop, self.steps_per_round)
            for i in range(min(fragments, self.steps_per_round))
            if (at := first + i * gap) + gap < stop
        }
        arriving = {at + gap: i for at, i in leaving.items()}
        marks = sorted({start, stop} | leaving.keys() | arriving.keys())
        return [Segment(a, b, arriving.get(b), leaving.get(b)) for a, b in pairwise(marks)]


def partition_into_fragments(sizes: Sequence[int], max_fragments: int) -> list[range]:
    """Split into runs of neighbours of about the same size: at most `max_fragments`, and none of them empty."""
    total, done, starts = sum(sizes), 0, list[int]()
    for i, size in enumerate(sizes):
        if done * max_fragments >= len(starts) * total:
            starts.append(i)
        done += size
    return [range(a, b) for a, b in zip(starts, [*starts[1:], len(sizes)], strict=True)]
