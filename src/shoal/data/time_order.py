"""The order of samples in time, and splits of it in which training never sees the future."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.permutation import Ids
from shoal.errors import error


@dataclass(frozen=True, eq=False)
class Timeline:
    """`rows` in the order of time, and the `times` in that order."""

    rows: Ids
    times: NDArray[Any]

    @staticmethod
    def of_rows(n: int) -> Timeline:
        """The timeline in which the order of rows is the order of time."""
        return Timeline(np.arange(n), np.arange(n))

    @staticmethod
    def of_column(values: NDArray[Any], name: str) -> Timeline:
        times = parse_times(values, name)
        rows = np.argsort(times, kind="stable")
        return Timeline(rows, times[rows])

    def boundary_at(self, position: int) -> int:
        """The last position up to this one that does not separate rows of the same time."""
        if position >= len(self.rows):
            return len(self.rows)
        return int(np.searchsorted(self.times, self.times[position], side="left"))


def forward_split(
    timeline: Timeline, start: int, boundary: int, stop: int, *, gap: int, max_train: int | None = None
) -> tuple[Ids, Ids]:
    """Positions start..boundary train (the last `max_train` of them), boundary..stop validate, and `gap` rows between
    them are unused.

    Boundaries move back so that they do not separate rows of the same time.
    """
    boundary, stop = timeline.boundary_at(boundary), timeline.boundary_at(stop)
    end = timeline.boundary_at(max(boundary - gap, 0))
    first = start if max_train is None else max(start, end - max_train)
    train, validation = timeline.rows[first:end], timeline.rows[boundary:stop]
    if not len(train) or not len(validation):
        raise error(
            "SH354",
            "so many rows have the same time that no sample is left for training or validation",
            where="data.split",
            fix="Use fewer folds, or a column with finer times.",
        )
    return np.sort(train), np.sort(validation)


def parse_times(values: NDArray[Any], name: str) -> NDArray[Any]:
    """Numbers and dates unchanged, texts parsed as ISO dates."""
    times = values if values.dtype.kind in "iufM" else _parse_text(values, name)
    missing = np.isnan(times) if times.dtype.kind == "f" else np.isnat(times) if times.dtype.kind == "M" else None
    if missing is not None and missing.any():
        row = int(np.flatnonzero(missing)[0])
        raise error("SH354", f"the time '{name}' of sample {row} is missing", where="data.split.by",
                    fix="Fill in the times, or leave these rows out.")  # fmt: skip
    return times


def _parse_text(values: NDArray[Any], name: str) -> NDArray[Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy converts times with a zone to UTC, and warns
            return np.array(values.tolist(), dtype="datetime64[us]")
    except (ValueError, TypeError) as failure:
        raise error("SH354", f"'{name}' holds no times: {failure}", where="data.split.by",
                    fix="Use numbers, dates, or texts like 2024-01-31T12:00.") from None  # fmt: skip
