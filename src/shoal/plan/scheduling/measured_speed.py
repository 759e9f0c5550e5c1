"""How long a step takes with a number of workers: fitted to what was measured, and the speed curve of a job from it.

    compute = alpha_c + beta_c * load
    sync    = alpha + beta * max(workers - 2, 0)      with one pair for workers on one node, one for several nodes
    step    = (compute^gamma + sync^gamma)^(1/gamma)  gamma says how much of the exchange hides behind computation

What was never measured is taken to cost nothing, so that a job tries more workers until it has seen what they bring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shoal.plan.scheduling.views import Floats, Ints

GROWTH_LIMIT = 2
"""A job may grow to so many times the largest number of workers that was measured."""
GAMMAS = np.array([1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0])
GAMMA_PENALTY = 1e-3
SMALLEST_S = 1e-8
OTHER_NODES = 1.1
"""An exchange between nodes takes at least so many times that of one within a node."""


@dataclass(frozen=True)
class MeasuredSpeed:
    """`seconds` has the time of a step by (workers, nodes), from this run, earlier ones or a plan.

    The global batch is dealt into `lanes`, so the load of a worker is its number of lanes: the worker with most of them
    sets the pace. Without any measurement more workers count as so much faster as lanes can be divided.
    """

    lanes: int
    seconds: Mapping[tuple[int, int], float] = field(default_factory=dict)
    gang: int = 1
    _model: StepTimeModel | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_model", self._fit())

    @property
    def most(self) -> int:
        tried = max((workers for workers, _ in self.seconds), default=0)
        return max(GROWTH_LIMIT * tried, self.gang)

    @property
    def measured(self) -> bool:
        return bool(self.seconds)

    def with_measurement(self, workers: int, nodes: int, step_s: float) -> MeasuredSpeed:
        return MeasuredSpeed(self.lanes, {**self.seconds, (workers, nodes): step_s}, self.gang)

    def speeds(self, workers: Ints, nodes: Ints) -> Floats:
        if self._model is None:
            return np.asarray(self.lanes / self._load(workers))
        step_s = self._model.step_s(nodes.astype(float), workers.astype(float), self._load(workers))
        known = [self.seconds.get(pair, 0.0) for pair in zip(workers.tolist(), nodes.tolist(), strict=True)]
        return np.asarray(1.0 / np.where(np.array(known) > 0, known, step_s))

    def _fit(self) -> StepTimeModel | None:
        rows = [(workers, nodes, s) for (workers, nodes), s in sorted(self.seconds.items())]
        loads = self._load(np.array([row[0] for row in rows], np.int64))
        measured = [
            StepMeasurement(nodes, workers, load, s)
            for (workers, nodes, s), load in zip(rows, loads.tolist(), strict=True)
        ]
        return fit(measured) if measured else None

    def _load(self, workers: Ints) -> Floats:
        replicas = np.maximum(workers // self.gang, 1)
        return np.asarray(np.maximum(np.ceil(self.lanes / replicas), 1.0))


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """`load`: what each worker computes in a step, in samples or lanes. `sync_s`: the visible part of the exchange."""

    nodes: int
    workers: int
    load: float
    step_s: float
    sync_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    alpha_c: float
    beta_c: float
    alpha_r: float
    beta_r: float
    alpha_n: float
    beta_n: float
    gamma: float

    def compute_s(self, load: Floats) -> Floats:
        return self.alpha_c + self.beta_c * load

    def sync_s(self, nodes: Floats, workers: Floats) -> Floats:
        more = np.maximum(workers - 2, 0)
        within, between = self.alpha_r + self.beta_r * more, self.alpha_n + self.beta_n * more
        return np.where(nodes > 1, between, np.where(workers > 1, within, SMALLEST_S))

    def step_s(self, nodes: Floats, workers: Floats, load: Floats) -> Floats:
        return self.combined(self.compute_s(load), self.sync_s(nodes, workers))

    def combined(self, compute_s: Floats, sync_s: Floats) -> Floats:
        total = (compute_s**self.gamma + sync_s**self.gamma) ** (1 / self.gamma)
        return np.asarray(total)


def fit(measured: Sequence[StepMeasurement]) -> StepTimeModel:
    """The best model over a few values of gamma; for each of them the rest is linear regression."""
    table = np.array([(it.nodes, it.workers, it.load, it.step_s, it.sync_s) for it in measured], np.float64)
    return fit_table(table)


def fit_table(table: Floats) -> StepTimeModel:
    """Like `fit`, with the fields of measurements as columns."""
    nodes, workers, load, step, sync = table.T
    alpha_c, beta_c = _fit_compute(load, np.maximum(step - sync, SMALLEST_S))
    compute = alpha_c + beta_c * load
    hidden = np.maximum(step ** GAMMAS[:, None] - compute ** GAMMAS[:, None], 0.0) ** (1 / GAMMAS[:, None])
    hidden = np.maximum(hidden, SMALLEST_S)
    weight = (hidden / step) ** (GAMMAS[:, None] - 1) / step
    several, one = nodes > 1, (nodes == 1) & (workers > 1)
    more = np.maximum(workers - 2, 0.0)
    alpha_n, beta_n = _fit_sync(more, hidden, weight, several)
    alpha_r, beta_r = _fit_sync(more, hidden, weight, one)
    predicted = np.where(several, alpha_n + beta_n * more, np.where(one, alpha_r + beta_r * more, SMALLEST_S))
    steps = (compute ** GAMMAS[:, None] + predicted ** GAMMAS[:, None]) ** (1 / GAMMAS[:, None])
    error = np.sqrt(((np.log(steps) - np.log(step)) ** 2).mean(axis=1)) + GAMMA_PENALTY * (GAMMAS - 1) ** 2
    best = int(np.argmin(error))
    within = (float(alpha_r[best, 0]), float(beta_r[best, 0]))
    between = (float(alpha_n[best, 0]), float(beta_n[best, 0]))
    if not several.any():
        between = (max(between[0], OTHER_NODES * within[0]), max(between[1], OTHER_NODES * within[1]))
    return StepTimeModel(alpha_c, beta_c, *within, *between, float(GAMMAS[best]))


def _fit_compute(load: Floats, compute: Floats) -> tuple[float, float]:
    """Least squares of relative errors. One load alone says nothing about the constant part: half of it."""
    if load.min() == load.max():
        half = float(compute.mean()) / 2
        return half, half / max(float(load[0]), SMALLEST_S)
    alpha, beta = _line(load[None], compute[None], 1 / compute[None])
    return max(float(alpha[0, 0]), SMALLEST_S), max(float(beta[0, 0]), SMALLEST_S)


def _fit_sync(more: Floats, hidden: Floats, weight: Floats, which: Floats) -> tuple[Floats, Floats]:
    if not which.any():
        nothing = np.full((len(GAMMAS), 1), SMALLEST_S)
        return nothing, nothing
    x = more[which]
    if x.min() == x.max():
        share = weight[:, which] ** 2
        alpha = (share * hidden[:, which]).sum(axis=1, keepdims=True) / share.sum(axis=1, keepdims=True)
        return np.maximum(alpha, SMALLEST_S), np.full_like(alpha, SMALLEST_S)
    return _line(np.broadcast_to(x, hidden[:, which].shape), hidden[:, which], weight[:, which])


def _line(x: Floats, y: Floats, weight: Floats) -> tuple[Floats, Floats]:
    """Weighted least squares of y = alpha + beta x, both at least 0, row by row."""
    share = weight**2 / (weight**2).sum(axis=1, keepdims=True)
    mean_x, mean_y = (share * x).sum(axis=1, keepdims=True), (share * y).sum(axis=1, keepdims=True)
    spread = (share * (x - mean_x) ** 2).sum(axis=1, keepdims=True)
    beta = (share * (x - mean_x) * (y - mean_y)).sum(axis=1, keepdims=True) / np.maximum(spread, 1e-300)
    alpha = mean_y - beta * mean_x
    through_origin = (share * x * y).sum(axis=1, keepdims=True) / (share * x * x).sum(axis=1, keepdims=True)
    alpha, beta = np.where(beta < 0, mean_y, alpha), np.maximum(beta, 0.0)
    beta = np.where(alpha < 0, through_origin, beta)
    return np.maximum(alpha, SMALLEST_S), np.maximum(beta, SMALLEST_S)
