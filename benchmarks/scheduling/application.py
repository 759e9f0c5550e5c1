"""The published measurements of one application: step times by placement, gradient statistics and progress by epoch."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy.interpolate import LinearNDInterpolator

from shoal.plan.scheduling.views import Floats

GPUS_PER_NODE = 4
MOST_NODES = 16
MOST_GPUS = 64
"""The measurements end here."""

Placement = tuple[int, ...]
"""GPUs on each node, in the order of the allocation."""


class OutOfProfileError(Exception):
    """The measurements say nothing about this placement or batch."""


@dataclass(frozen=True)
class Validation:
    """By epoch, at one total batch size."""

    progress: Floats
    iteration: Floats
    grad_sqr: Floats
    grad_var: Floats


@dataclass
class Application:
    name: str
    init_batch: int
    max_batch: int
    min_local: int
    max_local: int
    max_epochs: int
    placements: dict[str, Floats]
    """By digits of a placement: columns local batch, step time, sync time; sorted by local batch."""
    points: Floats
    """Columns nodes, GPUs, local batch, step time, sync time."""
    validations: dict[int, Validation]
    _throughput: dict[tuple[Placement, int], tuple[float, float]] = field(default_factory=dict, repr=False)
    _gradients: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict, repr=False)

    @cached_property
    def progress(self) -> list[float]:
        """Progress when `e` epochs are done."""
        least = np.min([it.progress[: self.max_epochs] for it in self.validations.values()], axis=0)
        return [0.0, *least.tolist()]

    @cached_property
    def compact_points(self) -> Floats:
        """Those on as few nodes as possible."""
        return np.compress(self.points[:, 0] == np.ceil(self.points[:, 1] / GPUS_PER_NODE), self.points, axis=0)

    @property
    def most_gpus(self) -> int:
        return 1 if self.name == "ncf" else min(MOST_GPUS, self.max_batch // self.min_local)

    @property
    def fixed_batch(self) -> int | None:
        return self.max_batch if self.name == "ncf" else None

    @cached_property
    def _interpolate(self) -> LinearNDInterpolator:
        return LinearNDInterpolator(self.points[:, :3], self.points[:, 3:])

    def throughput(self, placement: Placement, local: int) -> tuple[float, float]:
        """Seconds of a step, and of its visible exchange."""
        known = self._throughput.get((placement, local))
        if known is None:
            known = self._throughput[placement, local] = self._compute_throughput(placement, local)
        return known

    def _compute_throughput(self, placement: Placement, local: int) -> tuple[float, float]:
        smallest = min(placement[at:] + placement[:at] for at in range(len(placement)))
        rows = self.placements.get("".join(map(str, smallest)))
        if rows is not None:
            if not rows[0, 0] <= local <= rows[-1, 0]:
                raise OutOfProfileError(f"{self.name}: placement {smallest}, local batch {local}")
            return float(np.interp(local, rows[:, 0], rows[:, 1])), float(np.interp(local, rows[:, 0], rows[:, 2]))
        step, sync = self._interpolate([min(len(placement), MOST_NODES), sum(placement), local])[0]
        if np.isnan(step) or np.isnan(sync):
            raise OutOfProfileError(f"{self.name}: placement {smallest}, local batch {local}")
        return float(step), float(sync)

    def gradients(self, batch: int, epoch: int) -> tuple[float, float]:
        """Squared norm and variance of the gradient in an epoch (from 0)."""
        known = self._gradients.get((batch, epoch))
        if known is None:
            known = self._between(batch, epoch, "grad_sqr"), self._between(batch, epoch, "grad_var")
            self._gradients[batch, epoch] = known
        return known

    def iterations(self, batch: int, epoch: int) -> float:
        """How many iterations have been made at the end of an epoch (from 0) with a total batch size."""
        return self._between(batch, epoch, "iteration")

    def _between(self, batch: int, epoch: int, column: str) -> float:
        below = max((size for size in self.validations if size <= batch), default=None)
        above = min((size for size in self.validations if size >= batch), default=None)
        if below is None or above is None:
            raise OutOfProfileError(f"{self.name}: total batch {batch}")
        low, high = (float(getattr(self.validations[size], column)[epoch]) for size in (below, above))
        return low if below == above else ((batch - below) * high + (above - batch) * low) / (above - below)


def load_applications(data: Path) -> dict[str, Application]:
    """Applications of a data directory, by name."""
    return {
        row["application"]: _load(data / "profiles" / row["application"], row)
        for row in read_csv(data / "golden" / "applications.csv")
    }


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


def _load(directory: Path, constants: dict[str, str]) -> Application:
    rows = read_csv(directory / "placements.csv")
    scalability = _columns(read_csv(directory / "scalability.csv"), _POINT)
    return Application(
        name=constants["application"],
        init_batch=int(constants["init_batch_size"]),
        max_batch=int(constants["max_batch_size"]),
        min_local=int(constants["min_local_bsz"]),
        max_local=int(constants["max_local_bsz"]),
        max_epochs=int(constants["max_epochs"]),
        placements=_by_placement(rows),
        points=np.concatenate([_averaged(rows), scalability]),
        validations=dict(sorted(_validations(directory))),
    )


_POINT = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")


def _columns(rows: list[dict[str, str]], names: Iterable[str]) -> Floats:
    return np.array([[float(row[name]) for name in names] for row in rows], np.float64)


def _by_placement(rows: list[dict[str, str]]) -> dict[str, Floats]:
    found: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        found.setdefault(row["placement"], []).append(row)
    tables = {key: _columns(own, ("local_bsz", "step_time", "sync_time")) for key, own in found.items()}
    return {key: table[np.argsort(table[:, 0], kind="stable")] for key, table in tables.items()}


def _averaged(rows: list[dict[str, str]]) -> Floats:
    """Placements with the same numbers of nodes and GPUs and the same local batch count as one."""
    times = _columns(rows, ("local_bsz", "step_time", "sync_time"))
    shapes = np.array([(len(row["placement"]), sum(map(int, row["placement"]))) for row in rows], np.float64)
    keys, which = np.unique(np.column_stack([shapes, times[:, 0]]), axis=0, return_inverse=True)
    counts = np.bincount(which)
    means = [np.bincount(which, weights=times[:, column]) / counts for column in (1, 2)]
    return np.column_stack([keys, *means])


def _validations(directory: Path) -> Iterable[tuple[int, Validation]]:
    for path in directory.glob("validation-*.csv"):
        table = _columns(read_csv(path), ("progress", "iteration", "grad_sqr", "grad_var"))
        yield int(path.stem.split("-")[1]), Validation(*table.T)
