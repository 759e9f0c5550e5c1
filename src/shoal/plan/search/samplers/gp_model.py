"""A small Gaussian process over configuration and progress.

The value of a trial is a smooth function of its configuration that changes with progress, a trend in progress, a part
of its own, and noise. Length scales and weights are found by maximising the posterior with gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
PROGRESS_SCALE = 2.0
"""Distance in log progress over which the effect of a configuration changes."""
TREND = 1.0
JITTER = 1e-6
STEPS = 12
"""Steps of the optimiser at one fit; it begins where the last fit ended."""
BOUND = 3.0
"""How far a fit may go from the mean of the prior, in spreads of it."""
_SQRT5 = math.sqrt(5)


@dataclass(frozen=True)
class Hyperparameters:
    """Logarithms of: length scale per axis, weight of the common part, share that changes with progress, own part,
    noise."""

    theta: Array

    @classmethod
    def initial(cls, axes: int) -> Hyperparameters:
        return cls(_prior_mean(axes))

    def may_be_a_fit(self, axes: int) -> bool:
        """Whether a fit may have found these, for this number of axes."""
        if self.theta.shape != _prior_mean(axes).shape:
            return False
        return bool(np.all(np.abs(self.theta - _prior_mean(axes)) <= (BOUND + 1e-9) * _prior_spread(axes)))


def _prior_mean(axes: int) -> Array:
    scale = math.log(0.6) + 0.25 * math.log(max(axes, 1))
    return np.array([scale] * axes + [math.log(1.0), math.log(0.3), math.log(0.1), math.log(0.02)])


def _prior_spread(axes: int) -> Array:
    return np.array([0.9] * axes + [0.7, 0.7, 0.8, 1.0])


@dataclass(frozen=True)
class Observed:
    """Points of the process: squared distances need the columns of each axis. `trial` numbers the own parts."""

    features: Array
    progress: Array
    trial: NDArray[np.int64]

    def take(self, rows: NDArray[np.int64]) -> Observed:
        return Observed(self.features[rows], self.progress[rows], self.trial[rows])


def squared(one: Array, other: Array, columns: list[slice]) -> Array:
    """Squared distances along each axis: axes x rows x rows."""
    found = np.empty((len(columns), len(one), len(other)))
    for axis, part in enumerate(columns):
        total = np.zeros((len(one), len(other)))
        for column in range(part.start, part.stop):
            total += (one[:, column][:, None] - other[:, column][None]) ** 2
        found[axis] = total
    return found


def _matern(distance: Array) -> Array:
    r = _SQRT5 * np.sqrt(distance)
    return np.asarray((1 + r + r * r / 3) * np.exp(-r))


def kernel(theta: Array, one: Observed, other: Observed, *, columns: list[slice]) -> Array:
    """Covariances without noise."""
    axes = len(columns)
    scaled_one, scaled_other = (_scale(o.features, theta, columns) for o in (one, other))
    distance = (
        (scaled_one**2).sum(1)[:, None] + (scaled_other**2).sum(1)[None] - 2 * scaled_one @ scaled_other.T
    ).clip(0)
    change = np.abs(one.progress[:, None] - other.progress[None]) / PROGRESS_SCALE
    weight, share, own, _ = np.exp(theta[axes:])
    common = _matern(distance) * (weight + share * np.exp(-change))
    same = one.trial[:, None] == other.trial[None]
    trend = TREND * (1 + one.progress[:, None] * other.progress[None])
    return np.asarray(common + own * same * np.exp(-change) + trend)


def _scale(features: Array, theta: Array, columns: list[slice]) -> Array:
    scaled = np.empty_like(features)
    for axis, part in enumerate(columns):
        scaled[:, part] = features[:, part] / math.exp(theta[axis])
    return scaled


def fit(start: Hyperparameters, points: Observed, y: Array, *, columns: list[slice]) -> Hyperparameters:
    """A few steps of L-BFGS from the last fit."""
    from scipy.optimize import minimize

    axes = len(columns)
    parts = squared(points.features, points.features, columns)
    change = np.exp(-np.abs(points.progress[:, None] - points.progress[None]) / PROGRESS_SCALE)
    same = (points.trial[:, None] == points.trial[None]) * change
    trend = TREND * (1 + points.progress[:, None] * points.progress[None])
    mean, spread = _prior_mean(axes), _prior_spread(axes)

    def loss(theta: Array) -> tuple[float, Array]:
        return _loss(theta, y, parts=parts, change=change, same=same, trend=trend, prior=(mean, spread))

    bounds = [(m - BOUND * s, m + BOUND * s) for m, s in zip(mean, spread, strict=True)]
    found = minimize(
        loss, start.theta, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": STEPS, "maxfun": 2 * STEPS}
    )
    return Hyperparameters(np.asarray(found.x, dtype=np.float64))


def _loss(
    theta: Array, y: Array, *, parts: Array, change: Array, same: Array, trend: Array, prior: tuple[Array, Array]
) -> tuple[float, Array]:
    """Negative log posterior and its gradient."""
    from scipy.linalg import cho_solve, cholesky, lapack

    axes, count = len(parts), len(y)
    weight, share, own, noise = np.exp(theta[axes:])
    inverse = np.exp(-2 * theta[:axes])
    r = _SQRT5 * np.sqrt(np.tensordot(inverse, parts, axes=1))
    decay = np.exp(-r)
    smooth = (1 + r + r * r / 3) * decay
    mix = weight + share * change
    total = smooth * mix + own * same + trend
    total[np.diag_indices(count)] += noise + JITTER
    try:
        lower = cholesky(total, lower=True, check_finite=False)
    except np.linalg.LinAlgError:
        return 1e10, np.zeros_like(theta)
    alpha = cho_solve((lower, True), y, check_finite=False)
    whole, _ = lapack.dpotri(lower, lower=1)
    inner = np.tril(whole) + np.tril(whole, -1).T - np.outer(alpha, alpha)
    slope = inner * mix * ((5 / 3) * (1 + r) * decay)
    gradient = np.empty_like(theta)
    for axis in range(axes):
        gradient[axis] = 0.5 * inverse[axis] * np.vdot(slope, parts[axis])
    gradient[axes] = 0.5 * weight * np.vdot(inner, smooth)
    gradient[axes + 1] = 0.5 * share * np.vdot(inner, smooth * change)
    gradient[axes + 2] = 0.5 * own * np.vdot(inner, same)
    gradient[axes + 3] = 0.5 * noise * np.trace(inner)
    mean, spread = prior
    value = 0.5 * float(y @ alpha) + float(np.log(np.diag(lower)).sum())
    value += 0.5 * float((((theta - mean) / spread) ** 2).sum())
    return value, gradient + (theta - mean) / spread**2


@dataclass(frozen=True)
class Posterior:
    """The process after its observations."""

    theta: Array
    points: Observed
    columns: list[slice]
    lower: Array
    alpha: Array

    @classmethod
    def given(cls, hyper: Hyperparameters, points: Observed, y: Array, *, columns: list[slice]) -> Posterior:
        from scipy.linalg import cho_solve, cholesky

        total = kernel(hyper.theta, points, points, columns=columns)
        total[np.diag_indices(len(y))] += math.exp(hyper.theta[-1]) + JITTER
        lower = cholesky(total, lower=True, check_finite=False)
        return cls(hyper.theta, points, columns, lower, cho_solve((lower, True), y, check_finite=False))

    def mean(self, at: Observed) -> Array:
        return np.asarray(kernel(self.theta, at, self.points, columns=self.columns) @ self.alpha)

    def of_new(self, features: Array) -> Array:
        """Covariances of new trials at the end of their training with the observations."""
        one, other = _scale(features, self.theta, self.columns), _scale(self.points.features, self.theta, self.columns)
        weight, share = np.exp(self.theta[len(self.columns) : len(self.columns) + 2])
        mix = weight + share * np.exp(-np.abs(self.points.progress) / PROGRESS_SCALE)
        r = one @ (-2 * other.T)
        r += (one**2).sum(1)[:, None]
        r += (other**2).sum(1)[None]
        np.maximum(r, 0, out=r)
        r *= 5
        np.sqrt(r, out=r)
        smooth = np.exp(-r)
        smooth *= 1 + r * (1 + r / 3)
        smooth *= mix
        smooth += TREND
        return smooth

    def spread(self, cross: Array) -> Array:
        """Standard deviations of new trials from their covariances with the observations."""
        from scipy.linalg import solve_triangular

        half = solve_triangular(self.lower, cross.T, lower=True, check_finite=False)
        prior = float(np.exp(self.theta[len(self.columns) : -1]).sum()) + TREND
        return np.asarray(np.sqrt(np.maximum(prior - (half**2).sum(axis=0), 1e-12)))
