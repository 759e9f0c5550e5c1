"""How a total batch is split into GPUs, local batches and accumulation steps, and which one an adaptive job chooses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from benchmarks.scheduling.application import MOST_GPUS, Application
from shoal.plan.scheduling.measured_speed import StepTimeModel
from shoal.plan.scheduling.views import Floats, Ints

CANDIDATES = 50
EPSILON = 1e-8
"""Tolerance for rounding up."""


def split(app: Application, batch: int, gpus: int, *, always_accumulate: bool = False) -> tuple[int, int]:
    """Local batch and accumulation steps of a fixed total batch."""
    local = math.ceil(batch / gpus - EPSILON)
    accumulation = math.ceil(local / app.max_local - EPSILON) - 1
    if gpus == 1 and (batch > app.init_batch or always_accumulate):
        accumulation = max(1, accumulation)
    atomic = math.ceil(local / (accumulation + 1) - EPSILON)
    return min(atomic, app.max_batch // (gpus * (accumulation + 1))), accumulation


@dataclass(frozen=True)
class BatchChoices:
    """The total batches that an adaptive job considers, by (candidate, GPUs - 1)."""

    local: Floats
    accumulation: Floats
    total: Floats
    valid: Floats


@lru_cache(maxsize=64)
def _choices(init_batch: int, max_batch: int, min_local: int, max_local: int) -> BatchChoices:
    gpus = np.arange(1, min(MOST_GPUS, max_batch // min_local) + 1)
    local = np.geomspace(np.maximum(init_batch, min_local * gpus), max_batch, CANDIDATES) / gpus
    accumulation = np.ceil(local / max_local - EPSILON) - 1
    alone = (gpus == 1) & (local > init_batch + EPSILON)
    accumulation = np.where(alone, np.maximum(accumulation, 1), accumulation)
    atomic = np.ceil(local / (accumulation + 1) - EPSILON)
    valid = (atomic >= min_local) & (atomic <= max_local)
    return BatchChoices(atomic, accumulation, gpus * atomic * (accumulation + 1), valid)


def choices(app: Application) -> BatchChoices:
    return _choices(app.init_batch, app.max_batch, app.min_local, app.max_local)


@dataclass(frozen=True)
class GoodputModel:
    """Progress per second that a job expects: step times times the gain of a larger batch."""

    app: Application
    steps: StepTimeModel
    corrections: dict[tuple[int, int], float]
    """By (nodes, GPUs) that were tried: the factor between measured and modelled step times."""
    grad_sqr: float
    grad_var: float

    def table(self, gpus: Ints, nodes: Ints) -> Floats:
        """By (candidate, size)."""
        known, columns = choices(self.app), gpus - 1
        local, accumulation = known.local[:, columns], known.accumulation[:, columns]
        compute = self.steps.compute_s(local)
        step = self.steps.combined(compute, self.steps.sync_s(nodes.astype(float), gpus.astype(float)))
        factor = np.array([self.corrections.get(key, 1.0) for key in zip(nodes.tolist(), gpus.tolist(), strict=True)])
        gain = self.gain(known.total[:, columns])
        return np.where(known.valid[:, columns], gain / ((step + accumulation * compute) * factor), 0.0)

    def gain(self, total: Floats) -> Floats:
        return (self.grad_var + self.grad_sqr) / (self.grad_var * self.app.init_batch / total + self.grad_sqr)

    def best(self, gpus: int, nodes: int) -> tuple[int, int]:
        """Local batch and accumulation steps."""
        known = choices(self.app)
        at = int(np.argmax(self.table(np.array([gpus]), np.array([nodes]))[:, 0]))
        accumulation = int(known.accumulation[at, gpus - 1])
        local = int(known.local[at, gpus - 1])
        return min(local, self.app.max_batch // (gpus * (accumulation + 1))), accumulation
