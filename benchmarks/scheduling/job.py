"""A job of the simulation: its true progress, and what it has measured of itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from benchmarks.scheduling.application import GPUS_PER_NODE, MOST_GPUS, Application, Placement
from benchmarks.scheduling.batch import GoodputModel, split
from shoal.plan.scheduling.measured_speed import StepTimeModel, fit_table
from shoal.plan.scheduling.views import Floats

CLOSE_ENOUGH = 0.01
"""A model that predicts a new measurement so well (relative error) is not fitted again."""


@dataclass
class StepTimes:
    """Step times that a job knows, by (nodes, GPUs, local batch), and the model that fits them."""

    seconds: dict[tuple[int, int, int], tuple[float, float]] = field(default_factory=dict)
    prior: Floats | None = None
    """Measurements of earlier jobs of the application."""
    model: StepTimeModel | None = None
    corrections: dict[tuple[int, int], float] = field(default_factory=dict)
    tried: int = 0
    version: int = 0

    def __post_init__(self) -> None:
        if self.prior is not None:
            self.tried = MOST_GPUS
            self._fit()

    def observe(self, key: tuple[int, int, int], step_s: float, sync_s: float) -> None:
        if key in self.seconds:
            return
        self.seconds[key] = step_s, sync_s
        self.tried = max(self.tried, key[1])
        if not self._predicts(key, step_s, sync_s):
            self._fit()

    def _predicts(self, key: tuple[int, int, int], step_s: float, sync_s: float) -> bool:
        if self.model is None:
            return False
        nodes, gpus, local = (np.array(float(it)) for it in key)
        compute = float(self.model.compute_s(local))
        step = float(self.model.combined(np.array(compute), self.model.sync_s(nodes, gpus)))
        factor = self.corrections.get(key[:2], 0.0)
        close = abs(step * factor / step_s - 1) < CLOSE_ENOUGH
        return close and abs(compute * factor / (step_s - sync_s) - 1) < CLOSE_ENOUGH

    def _fit(self) -> None:
        own = np.array([(*key, *value) for key, value in self.seconds.items()], np.float64).reshape(-1, 5)
        prior = np.empty((0, 5)) if self.prior is None else self.prior
        self.model = fit_table(np.concatenate([prior, own]))
        self.corrections = _corrections(self.model, prior) | _corrections(self.model, own)
        self.version += 1


def _corrections(model: StepTimeModel, rows: Floats) -> dict[tuple[int, int], float]:
    nodes, gpus, local, step, _ = rows.T
    errors = np.log(step / model.step_s(nodes, gpus, local)).tolist()
    found: dict[tuple[int, int], list[float]] = {}
    for key, error in zip(zip(nodes.astype(int).tolist(), gpus.astype(int).tolist(), strict=True), errors, strict=True):
        found.setdefault(key, []).append(error)
    return {key: math.exp(math.fsum(own) / len(own)) for key, own in found.items()}


@dataclass
class SimulatedJob:
    """Time is in seconds since the start of the simulation. `batch`: a fixed total batch; None if the job adapts it.

    `min_workers`, `max_workers`, `tenant` and `priority` are requests to Shoal's policy; the published ones know none.
    """

    name: str
    app: Application
    submitted_s: int
    gpus_asked: int
    batch_asked: int
    batch: int | None
    min_workers: int = 1
    max_workers: int = MOST_GPUS
    tenant: str = ""
    priority: int = 0
    times: StepTimes = field(default_factory=StepTimes)
    finished_s: float | None = None
    first_alloc_s: float | None = None
    placement: Placement = ()
    restarts: int = -1
    pause_s: float = 0.0
    local: int = 0
    accumulation: int = 0
    progress: float = 0.0
    epoch: int = 0
    gpu_seconds: float = 0.0
    served_s: float = 0.0
    gradients: tuple[float, float] | None = None
    _goodput: tuple[tuple[int, tuple[float, float]], GoodputModel] | None = None
    _chosen: tuple[object, Placement] | None = None

    @property
    def most(self) -> int:
        """The largest number of GPUs that the policy may give: twice what was tried."""
        return min(max(2 * self.times.tried, 1), self.app.most_gpus)

    @property
    def remaining(self) -> float:
        return self.app.progress[-1] - self.progress

    def goodput(self) -> GoodputModel | None:
        """The same object until a measurement or a gradient changes it."""
        if self.times.model is None or self.gradients is None:
            return None
        key = (self.times.version, self.gradients)
        if self._goodput is None or self._goodput[0] != key:
            model = GoodputModel(self.app, self.times.model, self.times.corrections, *self.gradients)
            self._goodput = key, model
        return self._goodput[1]

    def reallocate(self, placement: Placement, restart_s: float) -> None:
        self.placement = placement
        if placement:
            self._choose_batch()
            self.pause_s = restart_s
            self.restarts += 1

    def _choose_batch(self) -> None:
        gpus = sum(self.placement)
        goodput = self.goodput() if self.batch is None else None
        if self._chosen is not None and self._chosen[0] is goodput and self._chosen[1] == self.placement:
            return
        if goodput is not None:
            self.local, self.accumulation = goodput.best(gpus, len(self.placement))
        else:
            batch = self.batch or max(self.app.init_batch, self.app.min_local * gpus)
            self.local, self.accumulation = split(self.app, batch, gpus)
        self._chosen = goodput, self.placement

    def rate(self) -> float:
        """True progress per second with the present allocation and batch. The job notes what it sees."""
        gpus = sum(self.placement)
        total = gpus * self.local * (self.accumulation + 1)
        step_s, sync_s = self.app.throughput(self.placement, self.local)
        sqr, var = self.app.gradients(total, self.epoch)
        if self.batch is None:
            self.gradients = sqr, var
            self.times.observe((len(self.placement), gpus, self.local), step_s, sync_s)
        gain = (var + sqr) / (var / (total / self.app.init_batch) + sqr)
        return gain / (step_s + (step_s - sync_s) * self.accumulation)

    def advance(self, now_s: float, seconds: float, interference: float = 0.0) -> None:
        """From `now_s` on for so many seconds."""
        if not self.placement or self.finished_s is not None:
            return
        gpus = sum(self.placement)
        left = seconds - self._pause(seconds)
        while left > 0 and self.finished_s is None:
            rate = self.rate() * (1.0 - interference)
            target = self.app.progress[self.epoch + 1]
            if self.progress + rate * left < target:
                self.progress += rate * left
                spent: float = left
            else:
                spent = min(round((target - self.progress) / rate), left)
                self.progress, self.epoch = target, self.epoch + 1
                if self.epoch == self.app.max_epochs:
                    self.finished_s = now_s + seconds - left + spent
            left -= spent
            self.gpu_seconds += spent * gpus
            self.served_s += spent
            self._choose_batch()

    def _pause(self, seconds: float) -> float:
        spent = min(self.pause_s, seconds)
        self.pause_s -= spent
        self.gpu_seconds += spent * sum(self.placement)
        self.served_s += spent
        return spent


def placement_of(nodes: tuple[int, ...]) -> Placement:
    """GPUs of each run of equal nodes."""
    found: list[int] = []
    for at, node in enumerate(nodes):
        if at and node == nodes[at - 1]:
            found[-1] += 1
        else:
            found.append(1)
    return tuple(found)


def whole_nodes(gpus: int) -> Placement:
    full, rest = divmod(gpus, GPUS_PER_NODE)
    return (GPUS_PER_NODE,) * full + ((rest,) if rest else ())
