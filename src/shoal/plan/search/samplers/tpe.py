"""Tree-structured Parzen estimators: values that are frequent among good trials and rare among the others."""

from __future__ import annotations

import math

import numpy as np

from shoal.plan.search.ledger import Ledger
from shoal.plan.search.samplers.base import RandomSampler, first_free
from shoal.plan.search.space import Cube, Point, Space
from shoal.plan.search.standing import standing
from shoal.spec.search.space import Choice

RANDOM_FIRST = 10
CANDIDATES = 64
GOOD_SHARE = 0.15
MOST_GOOD = 25
LEAST_WIDTH = 0.03


class TpeSampler:
    """Trials are split into the best 15 %, at most 25, and the others; those trained further count as better."""

    def propose(self, ledger: Ledger, number: int) -> Point | None:
        good, bad = split_trials(ledger)
        if len(good) + len(bad) < RANDOM_FIRST:
            return RandomSampler().propose(ledger, number)
        generator = ledger.generator(5, number)
        places = _draw(ledger.space, good, CANDIDATES, generator)
        gains = _log_density(ledger.space, good, places) - _log_density(ledger.space, bad, places)
        order = np.argsort(-gains, kind="stable")
        return first_free(ledger, [*places[order], *generator.random((64, places.shape[1]))])


def split_trials(ledger: Ledger) -> tuple[Cube, Cube]:
    """The places of good trials and of the others: those trained further come first (as in BOHB)."""
    known = [t for t in ledger.searched() if t.rows or t.status == "failed"]
    if not known:
        return np.empty((0, len(ledger.space.axes))), np.empty((0, len(ledger.space.axes)))
    order = standing(ledger, known)
    count = min(max(math.ceil(GOOD_SHARE * len(known)), 1), MOST_GOOD)
    cubes = np.array([t.point.cube for t in order])
    return cubes[:count], cubes[count:]


def _draw(space: Space, good: Cube, count: int, generator: np.random.Generator) -> Cube:
    """Places near good trials, one of them at random for each; the wide prior is one of them."""
    centres = generator.integers(0, len(good) + 1, size=count)
    widths = _widths(good)
    places = generator.random((count, good.shape[1]))
    for i, centre in enumerate(centres):
        if centre < len(good):
            near = good[centre] + widths * generator.normal(size=good.shape[1])
            near = np.abs(near)
            near = np.where(near > 1, 2 - near, near).clip(0, 1)
            keep = np.array([isinstance(a.values, Choice) and not a.values.ordered for a in space.axes])
            stay = generator.random(good.shape[1]) < 0.8
            places[i] = np.where(keep, np.where(stay, good[centre], places[i]), near)
    return places


def _widths(cubes: Cube) -> Cube:
    """Scott's rule, for each axis."""
    count, axes = cubes.shape
    spread = cubes.std(axis=0) if count > 1 else np.full(axes, 0.3)
    return np.asarray(np.maximum(spread * count ** (-1 / (axes + 4)), LEAST_WIDTH))


def _log_density(space: Space, cubes: Cube, places: Cube) -> Cube:
    """A mixture of normals (of equal options, for choices) around the points, and the uniform prior."""
    if not len(cubes):
        return np.zeros(len(places))
    widths = _widths(cubes)
    logs = np.zeros((len(places), len(cubes)))
    for axis, spec in enumerate(space.axes):
        if isinstance(spec.values, Choice) and not spec.values.ordered:
            count = len(spec.values.options)
            chosen = np.minimum((cubes[:, axis] * count).astype(int), count - 1)
            asked = np.minimum((places[:, axis] * count).astype(int), count - 1)
            logs += np.log(np.where(asked[:, None] == chosen[None], 0.8 + 0.2 / count, 0.2 / count))
        else:
            z = (places[:, axis][:, None] - cubes[:, axis][None]) / widths[axis]
            logs += -0.5 * z * z - math.log(widths[axis] * math.sqrt(2 * math.pi))
    both = np.concatenate([logs, np.zeros((len(places), 1))], axis=1)
    top = both.max(axis=1)
    return np.asarray(top + np.log(np.exp(both - top[:, None]).sum(axis=1)) - math.log(len(cubes) + 1))
