"""Which values matter: PED-ANOVA compares where the best trials lie on an axis with where all trials lie."""

from __future__ import annotations

import math

import numpy as np

from shoal.plan.search.ledger import Ledger
from shoal.plan.search.space import Cube
from shoal.plan.search.standing import standing
from shoal.spec.search.space import Choice

BEST_SHARE = 0.1
LEAST_BEST = 4
BINS = 24


def importance(ledger: Ledger) -> dict[str, float]:
    """A share of 1 for each key of the space, the largest first; {} while there are too few trials.

    Axes inside a choice count for the key that holds them, in proportion to how often they are active.
    """
    known = [t for t in ledger.searched() if t.rows]
    count = max(math.ceil(BEST_SHARE * len(known)), LEAST_BEST)
    if len(known) < 2 * LEAST_BEST:
        return {}
    cubes = np.array([t.point.cube for t in standing(ledger, known)])
    active = np.array([ledger.space.active(cube) for cube in cubes])
    shares = dict.fromkeys((d.key for d in ledger.space.dimensions), 0.0)
    for i, axis in enumerate(ledger.space.axes):
        rows, best = cubes[active[:, i], i], cubes[:count][active[:count, i], i]
        if len(best) >= 2 and len(rows) > len(best):
            options = len(axis.values.options) if isinstance(axis.values, Choice) else 0
            shares[ledger.space.key_of(i)] += divergence(best, rows, options) * len(rows) / len(cubes)
    total = math.fsum(shares.values())
    ranked = sorted(shares.items(), key=lambda item: -item[1])
    return {key: share / total if total > 0 else 1 / len(shares) for key, share in ranked}


def divergence(best: Cube, rows: Cube, options: int) -> float:
    """Pearson's divergence of the density of the best from that of all."""
    one, other = (_density(part, options) for part in (best, rows))
    return float(((one / other - 1) ** 2 * other).sum())


def _density(places: Cube, options: int) -> Cube:
    """Over the options, or over bins with a smooth kernel; a little everywhere."""
    if options:
        chosen = np.minimum((places * options).astype(int), options - 1)
        counts = np.bincount(chosen, minlength=options).astype(float) + 1 / options
        return np.asarray(counts / counts.sum())
    width = max(float(places.std()) * len(places) ** -0.2, 1 / BINS)
    centres = (np.arange(BINS) + 0.5) / BINS
    heights = np.exp(-0.5 * ((centres[:, None] - places[None]) / width) ** 2).sum(axis=1) + 1e-3
    return np.asarray(heights / heights.sum())
