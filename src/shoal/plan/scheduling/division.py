"""Divide slots between jobs: the largest sum of weight times utility of slots.

Each job's utilities are replaced by their concave hull, so that a size which is slower than a smaller one hides no
larger one: four workers on one node may be faster than six on two. Steps from vertex to vertex of all hulls are then
taken in order of gain per slot, while slots last. Hulls are kept with the job's table of sizes, so that a decision
computes only those that changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shoal.plan.scheduling.sizes import SizeTable
from shoal.plan.scheduling.views import Floats, Ints, JobView

SHORTEST_HORIZON_S, LONGEST_HORIZON_S = 60.0, 600.0
"""A change of workers must pay for itself within the remaining time of the job, cut to these limits."""
PER_OCTAVE = 4
"""Horizons are rounded to so many values per factor of two, so that hulls can be kept."""
LARGEST_LOSS = 0.9
ELASTICITY_SHARE = 0.8
"""A slot gains e / (1 - 0.8 e), relative to the slots that a job has, where its speed grows with the power e of the
slots. Without the divisor that is the logarithm of the speed (proportional fairness); with 1 instead of 0.8 it would
minimise the time of the job plus a price of its slot hours, and leave nothing to jobs that scale badly."""
NOWHERE = -1


@dataclass(frozen=True)
class Steps:
    """Steps of hulls: step k takes job `job[k]` to size `end[k]`. Those of a job are in order."""

    job: Ints
    end: Ints
    slots: Ints
    gain: Floats
    """Gain of utility per slot."""


def hull_steps(gains: Floats, slots: Ints) -> Steps:
    """Both by (job, size), padded with -inf. Size 0 is the smallest of a job, where its hull begins."""
    jobs = np.flatnonzero(np.isfinite(gains[:, 0])) if gains.shape[1] else np.empty(0, np.int64)
    at = np.zeros(len(jobs), np.int64)
    columns = np.arange(gains.shape[1])
    parts: list[tuple[Ints, Ints, Ints, Floats]] = []
    while len(jobs):
        here, cost = gains[jobs, at][:, None], slots[jobs, at][:, None]
        more = slots[jobs] - cost
        slope = np.where(columns > at[:, None], (gains[jobs] - here) / np.maximum(more, 1), -np.inf)
        best = np.argmax(slope, axis=1)
        rows = np.arange(len(jobs))
        up = slope[rows, best] > 0
        jobs, at, rows = jobs[up], best[up], rows[up]
        parts.append((jobs, at, more[rows, at], slope[rows, at]))
    if not parts:
        none = np.empty(0, np.int64)
        return Steps(none, none, none, np.empty(0))
    return Steps(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def all_steps(jobs: list[JobView], tables: list[SizeTable], held: list[int], left: Floats) -> Steps:
    """`held`: present workers of each job. `left`: remaining time with the smallest size, NaN if unknown."""
    keys = _keys(tables, held, left)
    missing = [row for row, key in enumerate(keys) if key not in tables[row].hulls]
    if missing:
        _compute(missing, jobs, tables, keys)
    found = [table.hulls[key] for table, key in zip(tables, keys, strict=True)]
    if not found:
        return hull_steps(np.empty((0, 0)), np.empty((0, 0), np.int64))
    ends, slots, gains = (np.concatenate([hull[part] for hull in found]) for part in range(3))
    return Steps(np.repeat(np.arange(len(found)), [len(hull[0]) for hull in found]), ends, slots, gains)


def _keys(tables: list[SizeTable], held: list[int], left: Floats) -> list[int]:
    """The present size and the rounded horizon as one number; `NOWHERE` for a job without workers."""
    sizes = np.array([table.index.get(count, NOWHERE) for table, count in zip(tables, held, strict=True)], np.int64)
    with np.errstate(invalid="ignore"):
        horizon = np.nan_to_num(left / np.maximum(held, 1), nan=LONGEST_HORIZON_S)
    octaves = np.log2(np.clip(horizon, SHORTEST_HORIZON_S, LONGEST_HORIZON_S) / SHORTEST_HORIZON_S)
    keys = np.where(sizes == NOWHERE, NOWHERE, sizes * 64 + np.rint(octaves * PER_OCTAVE).astype(np.int64))
    return list(keys.tolist())


def _compute(rows: list[int], jobs: list[JobView], tables: list[SizeTable], keys: list[int]) -> None:
    width = max(len(tables[row].counts) for row in rows)
    gains, slots = np.full((len(rows), width), -np.inf), np.zeros((len(rows), width), np.int64)
    for at, row in enumerate(rows):
        table = tables[row]
        gains[at, : len(table.counts)], slots[at, : len(table.counts)] = table.log_speeds, table.slots
        if keys[row] != NOWHERE:
            size, octave = divmod(keys[row], 64)
            gains[at, size] += _worth_of_staying(jobs[row].resize_s, octave)
    steps = hull_steps(_utility(gains, slots), slots)
    order = np.argsort(steps.job, kind="stable")
    edges = np.searchsorted(steps.job[order], np.arange(len(rows) + 1))
    for at, row in enumerate(rows):
        own: Ints = order[edges[at] : edges[at + 1]]
        tables[row].hulls[keys[row]] = steps.end[own], steps.slots[own], steps.gain[own]


def _utility(logs: Floats, slots: Ints) -> Floats:
    """The sum of the gains up to each size, along the hull of the logarithm of speed over that of slots, on which the
    elasticity e falls. Padding stays -inf."""
    found = np.where(np.isfinite(logs) & (np.arange(logs.shape[1]) == 0), 0.0, -np.inf)
    rows = np.flatnonzero(np.isfinite(logs[:, :1]).any(axis=1))
    columns, width, at = np.arange(logs.shape[1]), np.log(np.maximum(slots, 1)), np.zeros(len(rows), np.int64)
    while len(rows):
        here = np.arange(len(rows)), at
        longer = width[rows] - width[rows][here][:, None]
        faster = logs[rows] - logs[rows][here][:, None]
        with np.errstate(divide="ignore", invalid="ignore"):
            slope = np.where((columns > at[:, None]) & (longer > 0), faster / longer, -np.inf)
        best = np.argmax(slope, axis=1)
        elasticity = slope[here[0], best]
        total = found[rows, at][:, None] + faster / (1 - ELASTICITY_SHARE * np.clip(elasticity, 0.0, 1.0))[:, None]
        passed = (columns > at[:, None]) & (columns <= best[:, None])
        found[rows] = np.where(passed, total, found[rows])
        up = elasticity > 0
        rows, at = rows[up], best[up]
    return found


def _worth_of_staying(resize_s: float, octave: int) -> float:
    """The present size has no pause: what other sizes lose of the horizon, as a logarithm."""
    horizon = SHORTEST_HORIZON_S * 2.0 ** (octave / PER_OCTAVE)
    return float(-np.log1p(-min(resize_s / horizon, LARGEST_LOSS)))


def take_in_order(jobs: Ints, slots: Ints, room: int) -> Ints:
    """Indices of the steps that fit into `room`. A job that misses a step takes none of its later ones."""
    left = np.arange(len(jobs))
    taken: list[Ints] = []
    while room > 0 and len(left):
        total = np.cumsum(slots[left])
        fit = int(np.searchsorted(total, room, side="right"))
        if fit:
            taken.append(left[:fit])
            room -= int(total[fit - 1])
        left = _without_missed(left[fit:], jobs, slots, room)
    return np.concatenate(taken) if taken else np.empty(0, np.int64)


def _without_missed(left: Ints, jobs: Ints, slots: Ints, room: int) -> Ints:
    missed = left[slots[left] > room]
    if not len(missed):
        return left
    first = np.full(int(jobs.max()) + 1, len(jobs), np.int64)
    np.minimum.at(first, jobs[missed], missed)
    return left[left < first[jobs[left]]]


@dataclass(frozen=True)
class Room:
    """Slots in all, and for those users who have a quota. `user` gives each job's row in `quotas`, -1 for none."""

    slots: int
    user: Ints
    quotas: Ints


def admit(order: Ints, slots: Ints, room: Room) -> NDArray[np.bool_]:
    """Which jobs get their smallest size, in this order. One that does not fit lets others pass."""
    chosen = _within_quotas(order, order, slots[order], room, room.quotas)
    chosen = chosen[take_in_order(order[chosen], slots[order[chosen]], room.slots)]
    admitted = np.zeros(len(slots), bool)
    admitted[order[chosen]] = True
    return admitted


def divide(steps: Steps, weights: Floats, first: Ints, room: Room) -> Ints:
    """The size of every job: `first` has the slots of their smallest sizes (0 for those that get nothing)."""
    value = steps.gain * weights[steps.job]
    wanted = np.flatnonzero((first[steps.job] > 0) & (value > 0))
    ranked = wanted[np.argsort(-value[wanted], kind="stable")]
    jobs, slots = steps.job[ranked], steps.slots[ranked]
    used = np.zeros(len(room.quotas), np.int64)
    np.add.at(used, room.user[room.user >= 0], first[room.user >= 0])
    chosen = _within_quotas(np.arange(len(ranked)), jobs, slots, room, room.quotas - used)
    chosen = chosen[take_in_order(jobs[chosen], slots[chosen], room.slots - int(first.sum()))]
    sizes = np.zeros(len(first), np.int64)
    np.maximum.at(sizes, jobs[chosen], steps.end[ranked[chosen]])
    return sizes


def _within_quotas(index: Ints, jobs: Ints, slots: Ints, room: Room, left: Ints) -> Ints:
    """Positions of the steps that keep every user within what is left of the quota."""
    kept = np.ones(len(index), bool)
    user = room.user[jobs]
    for row in np.unique(user[user >= 0]):
        own = np.flatnonzero(user == row)
        kept[own] = False
        kept[own[take_in_order(jobs[own], slots[own], int(left[row]))]] = True
    return np.flatnonzero(kept)


def quota_rows(users: list[str], quotas: Mapping[str, int], total: int) -> Room:
    """The room of a cluster with `total` slots for jobs of these users."""
    rows = {name: row for row, name in enumerate(quotas)}
    return Room(
        total,
        np.array([rows.get(name, -1) for name in users], np.int64),
        np.array(list(quotas.values()), np.int64),
    )
