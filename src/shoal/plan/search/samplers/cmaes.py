"""CMA-ES: a normal distribution that moves and stretches towards good trials, generation by generation.

The state is computed anew from the ledger at every proposal, so it needs no memory of its own. A generation is made of
trials in the order of their numbers, so late results do not change which trials belong together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shoal.plan.search.ledger import Ledger, TrialState
from shoal.plan.search.samplers.base import first_free
from shoal.plan.search.samplers.one_thread import one_blas_thread
from shoal.plan.search.space import Cube, Point

FIRST_WIDTH = 0.3
TRIES = 32


@dataclass
class _Distribution:
    """Mean, step size, covariance and the two evolution paths."""

    mean: Cube
    sigma: float
    covariance: Cube
    path: Cube
    path_sigma: Cube


class CmaEsSampler:
    """Population size 4 + 3 ln(n), as Hansen recommends."""

    def propose(self, ledger: Ledger, number: int) -> Point | None:
        with one_blas_thread():
            state = _replay(ledger)
            generator = ledger.generator(6, number)
            root = _root(state.covariance)
            steps = generator.normal(size=(TRIES, len(state.mean)))
            places = (state.mean + state.sigma * steps @ root.T).clip(0, 1)
        return first_free(ledger, [*places, *generator.random((TRIES, len(state.mean)))])


def generation_size(axes: int) -> int:
    return 4 + int(3 * math.log(max(axes, 1)))


def _replay(ledger: Ledger) -> _Distribution:
    axes = len(ledger.space.axes)
    state = _Distribution(np.full(axes, 0.5), FIRST_WIDTH, np.eye(axes), np.zeros(axes), np.zeros(axes))
    size = generation_size(axes)
    known = [t for t in ledger.searched() if t.rows or t.status == "failed"]
    for number in range(len(known) // size):
        state = _update(state, _ranked(ledger, known[number * size : (number + 1) * size]), number)
    return state


def _ranked(ledger: Ledger, generation: list[TrialState]) -> Cube:
    """Places of a generation, best first, compared at the units that all of them reached."""
    alive = [t for t in generation if t.status != "failed"]
    common = min((t.reached for t in alive), default=0)
    ranked = ledger.ranking(alive, common) + [t for t in generation if t.status == "failed"]
    return np.array([t.point.cube for t in ranked])


def _root(covariance: Cube) -> Cube:
    values, vectors = np.linalg.eigh(covariance)
    return np.asarray(vectors * np.sqrt(np.maximum(values, 1e-14)))


def _update(state: _Distribution, places: Cube, number: int) -> _Distribution:
    """Hansen's tutorial, equations 39 to 45, with the default parameters."""
    size, axes = places.shape
    parents = size // 2
    weights = math.log(parents + 0.5) - np.log(np.arange(1, parents + 1))
    weights = weights / weights.sum()
    mass = 1 / float((weights**2).sum())
    c_sigma = (mass + 2) / (axes + mass + 5)
    damping = 1 + 2 * max(0.0, math.sqrt((mass - 1) / (axes + 1)) - 1) + c_sigma
    c_path = (4 + mass / axes) / (axes + 4 + 2 * mass / axes)
    c_one = 2 / ((axes + 1.3) ** 2 + mass)
    c_mu = min(1 - c_one, 2 * (mass - 2 + 1 / mass) / ((axes + 2) ** 2 + mass))
    expected = math.sqrt(axes) * (1 - 1 / (4 * axes) + 1 / (21 * axes**2))

    steps = (places[:parents] - state.mean) / state.sigma
    step = weights @ steps
    values, vectors = np.linalg.eigh(state.covariance)
    whitened = vectors @ ((vectors.T @ step) / np.sqrt(np.maximum(values, 1e-14)))
    path_sigma = (1 - c_sigma) * state.path_sigma + math.sqrt(c_sigma * (2 - c_sigma) * mass) * whitened
    length = float(np.linalg.norm(path_sigma))
    going = length / math.sqrt(1 - (1 - c_sigma) ** (2 * (number + 1))) < (1.4 + 2 / (axes + 1)) * expected
    path = (1 - c_path) * state.path + going * math.sqrt(c_path * (2 - c_path) * mass) * step
    kept = 1 - c_one - c_mu + (not going) * c_one * c_path * (2 - c_path)
    covariance = kept * state.covariance + c_one * np.outer(path, path)
    covariance = covariance + c_mu * (steps.T * weights) @ steps
    sigma = state.sigma * math.exp(min(1.0, (c_sigma / damping) * (length / expected - 1)))
    return _Distribution(state.mean + state.sigma * step, min(sigma, 1.0), covariance, path, path_sigma)
