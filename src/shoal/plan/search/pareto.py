"""Several objectives: fronts, crowding and hypervolume. Larger is better everywhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]


def fronts(values: Table) -> list[list[int]]:
    """Rows in fronts: no row of a front is dominated by a row of this or a later front."""
    left = list(range(len(values)))
    found = []
    while left:
        part = values[left]
        better = np.all(part[:, None] >= part[None], axis=2) & np.any(part[:, None] > part[None], axis=2)
        beaten = np.any(better, axis=0).tolist()
        front = [row for row, is_beaten in zip(left, beaten, strict=True) if not is_beaten]
        found.append(front)
        left = [i for i in left if i not in set(front)]
    return found


def crowding(values: Table) -> Table:
    """The distance of each row of one front to its neighbours; infinite at the ends."""
    distance = np.zeros(len(values))
    for column in values.T:
        order = np.argsort(column, kind="stable")
        spread = column[order[-1]] - column[order[0]]
        distance[order[0]] = distance[order[-1]] = np.inf
        if np.isfinite(spread) and spread > 0 and len(order) > 2:
            distance[order[1:-1]] += (column[order[2:]] - column[order[:-2]]) / spread
    return distance


def rank_scores(values: Table) -> Table:
    """One number per row: a better front counts more, and within a front a less crowded place."""
    scores = np.full(len(values), -np.inf)
    for rank, front in enumerate(fronts(values)):
        if not np.isfinite(values[front]).all():
            front = [i for i in front if np.isfinite(values[i]).all()]
        if front:
            distance = np.minimum(crowding(values[front]), 1e9)
            scores[front] = -rank + 0.9 * distance / (1 + distance)
    return scores


def hypervolume(values: Table, reference: Sequence[float]) -> float:
    """The volume that is dominated by the rows and dominates the reference."""
    inside = np.asarray([row for row in values if np.isfinite(row).all() and (row > np.asarray(reference)).all()])
    if not len(inside):
        return 0.0
    return _volume(inside[fronts(inside)[0]], np.asarray(reference, dtype=np.float64))


def _volume(points: Table, reference: Table) -> float:
    """By slices along the last objective."""
    if points.shape[1] == 1:
        return float(points.max() - reference[0])
    total = 0.0
    levels = sorted(set(points[:, -1].tolist()), reverse=True)
    for level, below in zip(levels, [*levels[1:], float(reference[-1])], strict=True):
        slab = points[points[:, -1] >= level][:, :-1]
        total += (level - below) * _volume(slab, reference[:-1])
    return total
