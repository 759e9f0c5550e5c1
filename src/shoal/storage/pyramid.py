"""A series of points with bins over them: any range is answered in a bounded number of bins, and no extreme is
lost. A bin of level k covers `FANOUT ** k` points. Appending changes the last bin of each level only."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FANOUT = 2
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Extremes = tuple[Floats, Floats]


@dataclass(frozen=True)
class Bins:
    """Consecutive bins: first and last step, time of the last point, extremes and last of the finite values (NaN if
    there is none), number of points and of those that are not finite."""

    first: Ints
    steps: Ints
    t: Floats
    least: Floats
    most: Floats
    last: Floats
    count: Ints
    not_finite: Ints

    @property
    def are_single(self) -> bool:
        """Whether each bin is one point."""
        return bool(np.all(self.count == 1))


class Series:
    """Points by increasing step. A step that comes again replaces the points from there on: a resumed run repeats
    steps, and the later row counts. Belongs to one thread at a time."""

    def __init__(self) -> None:
        self.steps, self.values = array("q"), array("d")
        self.times = array("f")  # seconds after `start_t`
        self.start_t = 0.0
        self._levels: list[Extremes] = []  # extremes by level, from level 1
        self._covered = 0  # points that the levels cover

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def columns(self) -> tuple[array[Any], array[Any], array[Any]]:
        return self.steps, self.times, self.values

    def is_valid(self) -> bool:
        """Whether columns that were read from a file can be a series."""
        same = len({len(column) for column in self.columns}) == 1
        return same and (len(self) < 2 or bool(np.all(np.diff(np.frombuffer(self.steps, np.int64)) > 0)))

    def add(self, step: int, t: float, value: float) -> None:
        if self.steps and step <= self.steps[-1]:
            self._cut(step)
        if not self.steps:
            self.start_t = t
        self.steps.append(step)
        self.times.append(t - self.start_t)
        self.values.append(value)

    def _cut(self, step: int) -> None:
        kept = int(np.searchsorted(np.frombuffer(self.steps, np.int64), step))
        for column in self.columns:
            del column[kept:]
        self._covered = min(self._covered, kept)

    def points(self) -> tuple[Ints, Floats]:
        """A copy of steps and values."""
        return np.array(self.steps, np.int64), np.array(self.values, np.float64)

    def bins(self, *, first: int, last: int, at_most: int) -> Bins:
        """The points with first <= step <= last in at most `at_most` + 1 bins."""
        if not self.steps:
            return Bins(*(np.zeros(0, kind) for kind in (int, int, float, float, float, float, int, int)))
        steps = np.frombuffer(self.steps, np.int64)
        low, high = int(np.searchsorted(steps, first)), int(np.searchsorted(steps, last, side="right"))
        level = 0
        while (high - low) > max(at_most, 1) * FANOUT**level:
            level += 1
        return self._cover(low, high, FANOUT**level, level)

    def _cover(self, low: int, high: int, width: int, level: int) -> Bins:
        """Bucket borders lie at multiples of the width, so that a growing series keeps its old bins."""
        steps, times = np.frombuffer(self.steps, np.int64), np.frombuffer(self.times, np.float32)
        values = np.frombuffer(self.values, np.float64)
        starts = np.arange(low - low % width, high, width, dtype=np.int64) if high > low else np.zeros(0, np.int64)
        ends = np.minimum(starts + width, high)
        starts = np.maximum(starts, low)
        least, most = self._extremes(values, starts, ends, width, level)
        lasts = ends - 1
        is_finite = np.isfinite(values[low:high])
        before = np.concatenate([[0], np.cumsum(~is_finite)])
        return Bins(
            steps[starts],
            steps[lasts],
            times[lasts].astype(np.float64) + self.start_t,
            least,
            most,
            _last_finite(values, is_finite, low, starts, lasts),
            ends - starts,
            before[ends - low] - before[starts - low],
        )

    def _extremes(self, values: Floats, starts: Ints, ends: Ints, width: int, level: int) -> Extremes:
        if level == 0:
            shown = values[starts]
            shown = np.where(np.isfinite(shown), shown, np.nan)
            return shown, shown
        self._grow()
        least, most = np.empty(len(starts)), np.empty(len(starts))
        ready = self._levels[level - 1] if level <= len(self._levels) else (np.zeros(0), np.zeros(0))
        whole = (ends - starts == width) & (starts // width < len(ready[0]))
        for row, column in ((0, least), (1, most)):
            column[whole] = ready[row][starts[whole] // width]
        for one in np.flatnonzero(~whole):
            least[one], most[one] = _range_extremes(values[starts[one] : ends[one]])
        return least, most

    def _grow(self) -> None:
        """Extend every level to the points that came since; bins that were whole before stay as they are."""
        values = np.frombuffer(self.values, np.float64)
        first = self._covered - self._covered % FANOUT
        points = np.where(np.isfinite(values[first:]), values[first:], np.nan)
        below = points, points  # from position `first` on
        level, width = 0, FANOUT
        while len(self) >= width:
            if len(self._levels) == level:
                self._levels.append((np.zeros(0), np.zeros(0)))
            kept, wanted = self._covered // width, len(self) // width
            span = slice(kept * FANOUT - first, wanted * FANOUT - first)
            grown = _reduced(self._levels[level], kept, below[0][span], below[1][span])
            self._levels[level] = below = grown
            level, width, first = level + 1, width * FANOUT, 0
        del self._levels[level:]
        self._covered = len(self)


def _reduced(old: Extremes, kept: int, least: Floats, most: Floats) -> Extremes:
    """The first `kept` bins, then those over the extremes of the level below."""
    return (
        np.concatenate([old[0][:kept], np.fmin.reduce(least.reshape(-1, FANOUT), axis=1)]),
        np.concatenate([old[1][:kept], np.fmax.reduce(most.reshape(-1, FANOUT), axis=1)]),
    )


def _range_extremes(values: Floats) -> tuple[Any, Any]:
    finite = values[np.isfinite(values)]
    return (finite.min(), finite.max()) if len(finite) else (np.nan, np.nan)


def _last_finite(values: Floats, is_finite: NDArray[np.bool_], low: int, starts: Ints, lasts: Ints) -> Floats:
    """The last finite value of each bin; NaN if it has none."""
    if not len(starts):
        return np.zeros(0)
    positions = np.maximum.accumulate(np.where(is_finite, np.arange(len(is_finite)), -1)) + low
    found = positions[lasts - low]
    return np.where(found >= starts, values[np.maximum(found, 0)], np.nan)


def first_difference(one: tuple[Ints, Floats], other: tuple[Ints, Floats]) -> int | None:
    """The first step that both have with different values; None if there is none. NaN is equal to NaN."""
    steps, mine, yours = np.intersect1d(one[0], other[0], return_indices=True)
    a, b = one[1][mine], other[1][yours]
    parted = steps[(a != b) & ~(np.isnan(a) & np.isnan(b))]
    return int(parted[0]) if len(parted) else None
