"""Tables of learning curves: every row is a configuration with its validation error after each epoch."""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.plan.search.space import Point, Space

ARRAYS = ("u", "x", "y", "t")
ROUNDED = 1e-6


@dataclass(frozen=True, eq=False)
class CurveTable:
    """`cube`: rows x dimensions, in the unit cube. `error`: rows x epochs, NaN from where it diverged. `time`: rows x
    epochs, since the start, in units of the mean training. `best` and `median` are of the configurations' values at the
    end of their training."""

    name: str
    cube: np.ndarray
    error: np.ndarray
    time: np.ndarray
    best: float
    median: float

    def regret(self, error: float) -> float:
        """0: as good as the best configuration at its end, or better; 1: as the median configuration at its end."""
        scale = (self.median - self.best) or 1.0
        return max(0.0, (min(error, self.worst) - self.best) / scale)

    @property
    def worst(self) -> float:
        """What counts while nothing was seen: the largest error after a first epoch."""
        first = self.error[:, 0]
        return float(np.max(first[np.isfinite(first)], initial=self.median))


def load_tables(folder: Path) -> list[CurveTable]:
    found = sorted(folder.rglob("*.npz"))
    if not found:
        raise SystemExit(f"no tables (*.npz) in {folder}")
    return [load_table(path) for path in found]


def load_table(path: Path) -> CurveTable:
    """The first point of a curve is the untrained net: it is left out. Other arrays of the file are not read."""
    try:
        with np.load(path) as file:
            data = {name: np.asarray(file[name], dtype=np.float64) for name in file.files if name in ARRAYS}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as failure:
        raise SystemExit(f"{path}: a table is an .npz file with arrays of numbers: {failure}") from None
    check(path, data)
    error = without_holes(data["y"][:, 1:])
    even = np.tile(np.arange(1.0, error.shape[1] + 1), (len(error), 1))
    time = elapsed(data["t"]) if "t" in data else even
    time = time / time[:, -1].mean()
    last = np.where(np.isnan(error[:, -1]), np.inf, error[:, -1])
    best, median = float(last.min()), float(np.median(last))
    if not np.isfinite(median):  # more than half have diverged
        median = float(np.max(last[np.isfinite(last)], initial=best))
    cube = data["u"] if "u" in data else ranks(data["x"])
    return CurveTable(path.stem, cube, error, time, best, median)


def without_holes(error: np.ndarray) -> np.ndarray:
    """A value that is missing between others is the one before it, at the beginning the first that is known. From where
    no value is finite any more, the configuration has diverged: those stay missing."""
    known = np.isfinite(error)
    place = np.where(known, np.arange(error.shape[1]), -1)
    place = np.maximum.accumulate(place, axis=1)
    filled = np.take_along_axis(error, np.where(place < 0, known.argmax(axis=1)[:, None], place), axis=1)
    diverged = ~np.flip(np.logical_or.accumulate(np.flip(known, axis=1), axis=1), axis=1)
    return np.where(diverged, np.nan, filled)


def check(path: Path, data: dict[str, np.ndarray]) -> None:
    """Say what is wrong with a file."""
    places = data.get("u", data.get("x"))
    if places is None or "y" not in data:
        raise SystemExit(f"{path}: a table has `y`, and `u` or `x`; this file has {sorted(data)}")
    if data["y"].ndim != 2 or data["y"].shape[1] < 2 or places.ndim != 2 or len(places) != len(data["y"]):
        raise SystemExit(f"{path}: `y` is rows x points (two or more), `u` or `x` rows x values, with as many rows")
    if not places.shape[1] or np.isnan(data.get("x", np.zeros(1))).any():
        raise SystemExit(f"{path}: `u` or `x` has no column, or values that are missing")
    if "u" in data and not ((data["u"] >= -ROUNDED) & (data["u"] <= 1 + ROUNDED)).all():
        raise SystemExit(
            f"{path}: `u` has values that are missing or outside of 0 to 1; give values as they are as `x`"
        )
    if "t" in data and data["t"].shape != data["y"].shape:
        raise SystemExit(f"{path}: `t` has another shape than `y`")
    if not np.isfinite(data["y"][:, -1]).any():
        raise SystemExit(f"{path}: every curve has diverged")


def elapsed(seconds: np.ndarray) -> np.ndarray:
    """Seconds since the untrained net. They never fall; where they are not known, an epoch lasts as long as the mean
    one."""
    lasts = np.diff(seconds, axis=1)
    known = np.isfinite(lasts)
    usual = float(lasts[known].mean()) if known.any() else 1.0
    return np.asarray(np.maximum(np.where(known, lasts, usual), 1e-9).cumsum(axis=1))


def ranks(values: np.ndarray) -> np.ndarray:
    """Each column as its ranks from 0 to 1: how the configurations were drawn, whatever the scale. Equal values share
    theirs."""
    from scipy.stats import rankdata

    return np.asarray((rankdata(values, axis=0) - 0.5) / len(values))


class TableSpace(Space):
    """The rows of a table as a space: a place in the cube stands for the nearest row that was not used."""

    def __init__(self, table: CurveTable) -> None:
        super().__init__({f"x{i}": {"low": 0.0, "high": 1.0} for i in range(table.cube.shape[1])})
        self.points = [Point(tuple(row.tolist()), {"row": i}) for i, row in enumerate(table.cube)]
        self.keys = [point.key for point in self.points]
        self.rows = table.cube

    @property
    def size(self) -> int:
        return len(self.points)

    def free(self, taken: Collection[str]) -> np.ndarray:
        return np.array([key not in taken for key in self.keys])

    def settle(self, cube: Any, taken: Collection[str] = ()) -> Point | None:
        distance = ((self.rows - np.asarray(cube)) ** 2).sum(axis=1)
        distance[~self.free(taken)] = np.inf
        nearest = int(np.argmin(distance))
        return self.points[nearest] if np.isfinite(distance[nearest]) else None

    def suggest(self, values: Mapping[str, Any]) -> Point:
        found = self.settle([values[f"x{i}"] for i in range(self.rows.shape[1])])
        assert found is not None
        return found

    def candidates(
        self, generator: np.random.Generator, count: int, *, near: Any, taken: Collection[str]
    ) -> np.ndarray:
        free = np.flatnonzero(self.free(taken))
        return self.rows[np.sort(generator.permutation(free)[:count])] if len(free) else self.rows[:1]
