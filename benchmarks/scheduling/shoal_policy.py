"""The policy of `shoal.plan.scheduling` in the simulated cluster: simulated jobs become views."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from benchmarks.scheduling.batch import GoodputModel
from benchmarks.scheduling.cluster import Allocations, Nodes, Setting
from benchmarks.scheduling.job import SimulatedJob
from shoal.plan.scheduling import JobView, NodeView, SchedulingPolicy
from shoal.plan.scheduling.views import Floats, Ints

Sizes = Literal["blind", "declared", "warm"]


@dataclass(frozen=True)
class GoodputCurve:
    """Progress per second by GPUs, as far as the job has tried. Without any measurement: as many times as GPUs."""

    model: GoodputModel | None
    most: int

    @property
    def measured(self) -> bool:
        return self.model is not None

    def speeds(self, workers: Ints, nodes: Ints) -> Floats:
        if self.model is None:
            return workers.astype(np.float64)
        return np.asarray(self.model.table(workers, nodes).max(axis=0))


@dataclass
class ShoalPolicy:
    setting: Setting
    sizes: Sizes
    policy: SchedulingPolicy
    _curves: dict[str, GoodputCurve] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._nodes = {node: NodeView(self.setting.gpus_per_node) for node in range(self.setting.nodes)}

    def decide(self, now_s: float, jobs: Mapping[str, SimulatedJob], current: Mapping[str, Nodes]) -> Allocations:
        views = {key: self.view(job) for key, job in jobs.items()}
        decision = self.policy.decide(now_s, views, self._nodes, current)
        return dict(decision.allocation)

    def view(self, job: SimulatedJob) -> JobView:
        return JobView(
            id=job.name,
            curve=self._curve(job),
            least=job.min_workers,
            most=job.max_workers,
            priority=job.priority,
            user=job.tenant,
            submitted_s=job.submitted_s,
            served_s=job.served_s,
            remaining=None if self.sizes == "blind" else job.remaining,
            resize_s=self.setting.restart_s,
        )

    def _curve(self, job: SimulatedJob) -> GoodputCurve:
        known, model, most = self._curves.get(job.name), job.goodput(), job.most
        if known is None or known.model is not model or known.most != most:
            known = self._curves[job.name] = GoodputCurve(model, most)
        return known
