"""A series of points with extremes over blocks of them: any range is answered in a bounded number of bins, and no
extreme is lost. Appending makes new blocks and changes no old one."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK = 64
"""Points of a block. Bins have a power of two of points, so those that are at least as wide consist of whole blocks."""
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Summary(NamedTuple):
    """Of consecutive ranges of points: extremes of the finite values (NaN if there is none), and how many are not."""

    least: Floats
    most: Floats
    not_finite: Ints

    def first(self, count: int) -> Summary:
        return Summary(self.least[:count], self.most[:count], self.not_finite[:count])


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
        self._blocks = _summary(np.zeros(0), np.zeros(0, np.int64))  # of whole blocks

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
        steps = self.steps
        if steps and step <= steps[-1]:
            self._cut(step)
        if not steps:
            self.start_t = t
        steps.append(step)
        self.times.append(t - self.start_t)
        self.values.append(value)

    def _cut(self, step: int) -> None:
        kept = int(np.searchsorted(np.frombuffer(self.steps, np.int64), step))
        for column in self.columns:
            del column[kept:]
        self._blocks = self._blocks.first(kept // BLOCK)

    def points(self) -> tuple[Ints, Floats]:
        """A copy of steps and values."""
        return np.array(self.steps, np.int64), np.array(self.values, np.float64)

    def bins(self, *, first: int, last: int, at_most: int) -> Bins:
        """The points with first <= step <= last in at most `at_most` + 1 bins. The borders of bins lie at multiples of
        their width, so a growing series keeps its old bins."""
        steps, times = np.frombuffer(self.steps, np.int64), np.frombuffer(self.times, np.float32)
        low, high = int(np.searchsorted(steps, first)), int(np.searchsorted(steps, last, side="right"))
        width = 1
        while high - low > max(at_most, 1) * width:
            width *= 2
        borders = np.arange(low - low % width, max(low, high), width, dtype=np.int64)
        starts, ends = np.maximum(borders, low), np.minimum(borders + width, high)
        found = self._summary_of(starts, ends)
        return Bins(
            first=steps[starts],
            steps=steps[ends - 1],
            t=times[ends - 1].astype(np.float64) + self.start_t,
            least=found.least,
            most=found.most,
            last=self._last_finite(starts, ends),
            count=ends - starts,
            not_finite=found.not_finite,
        )

    def _summary_of(self, starts: Ints, ends: Ints) -> Summary:
        """Of consecutive ranges; all but the first and the last are equally wide."""
        values = np.frombuffer(self.values, np.float64)
        if len(starts) < 3 or ends[1] - starts[1] < BLOCK:
            low, high = (starts[0], ends[-1]) if len(starts) else (0, 0)
            return _summary(values[low:high], starts - low)
        self._grow()
        inner, end = starts[1:-1] // BLOCK, ends[-2] // BLOCK
        least, most, not_finite = self._blocks.first(end)
        parts = (
            _summary(values[: ends[0]], starts[:1]),
            Summary(np.fmin.reduceat(least, inner), np.fmax.reduceat(most, inner), np.add.reduceat(not_finite, inner)),
            _summary(values[: ends[-1]], starts[-1:]),
        )
        return _joined(parts)

    def _grow(self) -> None:
        """Summarise the whole blocks that came since."""
        first, last = BLOCK * len(self._blocks.least), len(self) - len(self) % BLOCK
        values = np.frombuffer(self.values, np.float64)[first:last]
        self._blocks = _joined((self._blocks, _summary(values, np.arange(0, len(values), BLOCK))))

    def _last_finite(self, starts: Ints, ends: Ints) -> Floats:
        """The last finite value of each range; NaN if it has none."""
        values = np.frombuffer(self.values, np.float64)
        found: Floats = values[ends - 1]
        for n in np.flatnonzero(~np.isfinite(found)):
            finite = np.flatnonzero(np.isfinite(values[starts[n] : ends[n]]))
            found[n] = values[starts[n] + finite[-1]] if len(finite) else np.nan
        return found


def _summary(values: Floats, starts: Ints) -> Summary:
    """Of the ranges that begin at `starts`; the last ends with the values."""
    if not len(starts):
        return Summary(np.zeros(0), np.zeros(0), np.zeros(0, np.int64))
    values, starts = values[starts[0] :], starts - starts[0]
    is_finite = np.isfinite(values)
    shown = values if is_finite.all() else np.where(is_finite, values, np.nan)
    lost = np.flatnonzero(~is_finite)  # summing the flags as integers would take 8 bytes for each point
    not_finite = np.diff(np.searchsorted(lost, np.append(starts, len(values))))
    return Summary(np.fmin.reduceat(shown, starts), np.fmax.reduceat(shown, starts), not_finite)


def _joined(parts: tuple[Summary, ...]) -> Summary:
    return Summary(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


class Parting(NamedTuple):
    """The values part after the step `after`, and at the latest at the step `at`. `after` is 0 if no earlier step is
    in both."""

    after: int
    at: int


def first_difference(one: tuple[Ints, Floats], other: tuple[Ints, Floats]) -> Parting | None:
    """Where two series part, as far as the steps tell that both have: a point may stand for several steps. None if
    they do not. NaN is equal to NaN."""
    steps, mine, yours = np.intersect1d(one[0], other[0], return_indices=True)
    a, b = one[1][mine], other[1][yours]
    parted = np.flatnonzero((a != b) & ~(np.isnan(a) & np.isnan(b)))
    if not len(parted):
        return None
    first = int(parted[0])
    return Parting(after=int(steps[first - 1]) if first else 0, at=int(steps[first]))
