"""Bayesian proposals: a Gaussian process over configuration and progress, expected improvement divided by cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from shoal.plan.search.ledger import Ledger, TrialState
from shoal.plan.search.samplers.base import RandomSampler, first_free
from shoal.plan.search.samplers.gp_model import Array, Hyperparameters, Observed, Posterior, fit
from shoal.plan.search.samplers.one_thread import one_blas_thread
from shoal.plan.search.space import Point
from shoal.plan.search.values import penalised

RANDOM_FIRST = 8
RANDOM_SHARE = 0.2
MOST_TRIALS = 160
MOST_FITTED = 110
CANDIDATES = 800
EXAMINED = 300
"""Candidates with the best expectation whose improvement is computed."""
NEAR = 0.01
"""Two configurations teach the same if they differ on every axis by less than this part of it."""
REFIT_GROWTH = 1.12
BACK = (1, 3, 9)
"""A trial is observed at its last unit, at a third and at a ninth of it."""
AUGMENT = 0.05
"""What the sum of all shortfalls counts beside the largest one, with several metrics (as in ParEGO)."""


@dataclass(frozen=True)
class Fit:
    """The newest fit, and how many observations there were."""

    count: int
    hyper: Hyperparameters

    @property
    def memory(self) -> tuple[float, ...]:
        return float(self.count), *map(float, self.hyper.theta)


def last_fit(ledger: Ledger) -> Fit | None:
    """The fit with which the newest trial of the model was proposed. Numbers that no fit gives do not count."""
    memory = next((t.point.memory for t in reversed(ledger.trials) if t.point.memory), ())
    if not memory or not math.isfinite(memory[0]):
        return None
    found = Fit(int(memory[0]), Hyperparameters(np.array(memory[1:], dtype=np.float64)))
    return found if found.hyper.may_be_a_fit(len(ledger.space.axes)) else None


@dataclass
class GpSampler:
    """`cost_aware`: improvement is divided by the predicted cost of the trial."""

    cost_aware: bool = True
    random_share: float = RANDOM_SHARE
    _random: RandomSampler = field(default_factory=RandomSampler)

    def propose(self, ledger: Ledger, number: int) -> Point | None:
        known = [t for t in ledger.searched() if t.rows or t.status == "failed"]
        if len(known) < RANDOM_FIRST or ledger.generator(3, number).random() < self.random_share:
            return self._random.propose(ledger, number)
        with one_blas_thread():
            return self._best_candidate(ledger, number, known)

    def _best_candidate(self, ledger: Ledger, number: int, known: list[TrialState]) -> Point | None:
        generator = ledger.generator(4, number)
        columns = axis_columns(ledger)
        chosen = choose_trials(ledger, known, generator)
        points, y = observations(ledger, chosen, generator)
        made = fit_again(last_fit(ledger), points, y, columns, generator)
        posterior = with_pending(
            ledger, Posterior.given(made.hyper, points, y, columns=columns), y, columns, made.hyper
        )
        goal = float(posterior.mean(at_end(points)).max())
        best = ledger.ranking([t for t in chosen if t.rows and t.status != "failed"])[:8]
        near = np.array([t.point.cube for t in best]).reshape(len(best), len(columns))
        places = ledger.space.candidates(generator, CANDIDATES, near=near, taken=ledger.taken)
        gains = self._gains(ledger, posterior, places, goal)
        found = first_free(ledger, new_ones_first(ledger, places[np.argsort(-gains, kind="stable")[:EXAMINED]]))
        return None if found is None else replace(found, memory=made.memory)

    def _gains(self, ledger: Ledger, posterior: Posterior, places: Array, goal: float) -> Array:
        cross = posterior.of_new(ledger.space.features(places))
        means = cross @ posterior.alpha
        best = np.argsort(-means, kind="stable")[:EXAMINED]
        gains = np.full(len(places), -np.inf)
        gains[best] = log_improvement(means[best], posterior.spread(cross[best]), goal)
        if self.cost_aware:
            gains[best] -= log_costs(ledger, places[best])
        return gains


def fit_again(
    last: Fit | None, points: Observed, y: Array, columns: list[slice], generator: np.random.Generator
) -> Fit:
    """The last fit, or one that begins there if there are 12 % more observations; it sees some of them."""
    if last is not None and len(y) < last.count * REFIT_GROWTH and last.count < MOST_TRIALS:
        return last
    rows = np.sort(generator.permutation(len(y))[:MOST_FITTED])
    start = last.hyper if last is not None else Hyperparameters.initial(len(columns))
    return Fit(len(y), fit(start, points.take(rows), y[rows], columns=columns))


def new_ones_first(ledger: Ledger, places: Array) -> Iterator[Array]:
    """The places in their order, those that are near a trial last: a space may have no others."""
    tried = np.array([t.point.cube for t in ledger.trials])
    near = []
    for place in places:
        if np.abs(tried - place).max(axis=1).min() < NEAR:
            near.append(place)
        else:
            yield place
    yield from near


def axis_columns(ledger: Ledger) -> list[slice]:
    """The feature columns of each axis."""
    found, at = [], 0
    for axis in ledger.space.axes:
        options = getattr(axis.values, "options", ())
        width = len(options) if options and not getattr(axis.values, "ordered", False) else 1
        found.append(slice(at, at + width))
        at += width
    return found


def choose_trials(ledger: Ledger, known: list[TrialState], generator: np.random.Generator) -> list[TrialState]:
    """At most `MOST_TRIALS`: those that were trained furthest, and a random part of the others."""
    if len(known) <= MOST_TRIALS:
        return known
    order = generator.permutation(len(known))
    furthest = sorted(range(len(known)), key=lambda i: (-known[i].reached, int(order[i])))[: MOST_TRIALS // 2]
    rest = [i for i in sorted(range(len(known)), key=lambda i: int(order[i])) if i not in set(furthest)]
    return [known[i] for i in sorted([*furthest, *rest[: MOST_TRIALS - len(furthest)]])]


def observations(ledger: Ledger, trials: list[TrialState], generator: np.random.Generator) -> tuple[Observed, Array]:
    """Points and standardised values. A failed trial counts as bad as the worst one; trials that break a constraint
    count as worse than all that do not."""
    weights = generator.dirichlet(np.ones(len(ledger.objectives)))
    rows = [row for i, trial in enumerate(trials) for row in _rows_of(ledger, i, trial)]
    numbers, progress = np.array([i for i, _, _ in rows]), np.array([p for _, p, _ in rows])
    broken = np.array([0.0 if trial.status == "failed" else ledger.violation(trial) for trial in trials])
    values = penalised(as_one(np.array([found for _, _, found in rows]), weights), broken[numbers])
    values = standardised(normal_scores(values))
    cubes = np.array([trials[i].point.cube for i, _, _ in rows])
    points = Observed(
        ledger.space.features(cubes),
        progress,
        numbers.astype(np.int64),
    )
    return points, values


def _rows_of(ledger: Ledger, i: int, trial: TrialState) -> list[tuple[int, float, tuple[float, ...]]]:
    whole = max(trial.shape.units, 1)
    if trial.status == "failed":
        return [(i, math.log(max(trial.reached, 1) / whole), (-math.inf,) * len(ledger.objectives))]
    units = sorted({max(trial.reached // back, trial.origin + 1) for back in BACK if trial.reached // back >= 1})
    return [(i, math.log(unit / whole), ledger.curve_at(trial, unit)) for unit in units]


def as_one(table: Array, weights: Array) -> Array:
    """One number per row of metrics, larger is better: how far the weighted worst one is from the best value so far.
    The unit of each metric is the distance from the median to the best, so that neither its scale nor a few that
    diverged count. -inf where one is not a number."""
    finite = np.isfinite(table).all(axis=1)
    if table.shape[1] == 1 or not finite.any():
        return table[:, 0]
    sound = table[finite]
    best = sound.max(axis=0)
    with np.errstate(over="ignore"):
        halves, wholes = best - np.median(sound, axis=0), best - sound.min(axis=0)
        unit = np.where(halves > 0, halves, np.where(wholes > 0, wholes, 1.0))
        short = weights * (best - sound) / unit
    made = np.full(len(table), -np.inf)
    made[finite] = -(short.max(axis=1) + AUGMENT * short.sum(axis=1))
    return made


def normal_scores(values: Array) -> Array:
    """The normal quantiles of the ranks, equal values sharing theirs: only the order counts, so that no divergent
    trial hides the differences among good ones."""
    from scipy.special import ndtri

    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - 0.5 * counts
    return np.asarray(ndtri(middle / len(values))[inverse.reshape(-1)])


def standardised(values: Array) -> Array:
    spread = float(values.std())
    return np.asarray((values - values.mean()) / (spread or 1.0))


def with_pending(
    ledger: Ledger, posterior: Posterior, y: Array, columns: list[slice], hyper: Hyperparameters
) -> Posterior:
    """The process as if trials under way had the values that it expects of them: they are not proposed again."""
    pending = [t for t in ledger.searched() if t.status == "running" and not t.rows]
    if not pending:
        return posterior
    features = ledger.space.features(np.array([t.point.cube for t in pending]))
    progress = np.array([math.log(max(t.until, 1) / t.shape.units) for t in pending])
    last = int(posterior.points.trial.max()) + 1
    added = Observed(features, progress, np.arange(last, last + len(pending)))
    known = posterior.points
    points = Observed(
        np.concatenate([known.features, added.features]),
        np.concatenate([known.progress, added.progress]),
        np.concatenate([known.trial, added.trial]),
    )
    return Posterior.given(hyper, points, np.concatenate([y, posterior.mean(added)]), columns=columns)


def at_end(points: Observed) -> Observed:
    """The same trials at the end of their training."""
    return Observed(points.features, np.zeros(len(points.progress)), points.trial)


def log_improvement(mean: Array, spread: Array, goal: float) -> Array:
    """The logarithm of the expected improvement over the goal; accurate where it is tiny."""
    from scipy.special import erfcx, log_ndtr

    z = (mean - goal) / spread
    density = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    near = np.log(np.maximum(density + z * np.exp(log_ndtr(z)), 1e-300))
    far_z = np.minimum(z, -1.0)
    ratio = 1 + far_z * math.sqrt(math.pi / 2) * erfcx(-far_z / math.sqrt(2))
    far = -0.5 * far_z * far_z - 0.5 * math.log(2 * math.pi) + np.log(np.maximum(ratio, 1e-12))
    return np.asarray(np.where(z > -1, near, far) + np.log(spread))


def log_costs(ledger: Ledger, places: Array) -> Array:
    """Predicted logarithms of cost: a ridge regression on squares and products of the axes."""
    known = [t for t in ledger.searched() if t.shape.cost > 0]
    logs = np.log([t.shape.cost for t in known])
    if len(known) < RANDOM_FIRST or float(np.ptp(logs)) < 1e-9:
        return np.zeros(len(places))
    basis = _quadratic(np.array([t.point.cube for t in known]))
    penalty = 0.1 * np.eye(basis.shape[1])
    penalty[0, 0] = 1e-9
    weights = np.linalg.solve(basis.T @ basis + penalty, basis.T @ logs)
    predicted = _quadratic(places) @ weights
    return np.asarray(predicted.clip(logs.min(), logs.max()))


def _quadratic(cubes: Array) -> Array:
    centred = cubes - 0.5
    upper = np.triu_indices(cubes.shape[1])
    return np.concatenate([np.ones((len(cubes), 1)), centred, (centred[:, upper[0]] * centred[:, upper[1]])], axis=1)
