"""A worker's progress besides its weights: step, loss, evaluations, and the state of the watchers and of the task."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any

import torch
from torch import Tensor

from shoal.collectives.outcome import Committed
from shoal.data.samplers import LaneSampler
from shoal.data.source import DataSource
from shoal.errors import error
from shoal.events import Event
from shoal.spec.view import position_of
from shoal.strategies.context import Metrics
from shoal.tasks.task import Task
from shoal.train.activity import Activity
from shoal.train.reporting import Reporter, StepStats
from shoal.train.watchers import BestMetric


class Progress:
    """See RunProgress. Every worker arrives at the same values.

    Belongs to the training thread. The strategy writes steps, the loop writes evaluations.
    """

    def __init__(
        self,
        *,
        sampler: LaneSampler,
        task: Task,
        reporter: Reporter,
        stats: StepStats,
        activity: Activity,
        best: BestMetric,
        has_state: bool,
    ) -> None:
        self.reporter = reporter
        self.stats = stats
        self.activity = activity
        self.best = best
        self.has_state = has_state
        self.step = 0
        self.loss = math.nan
        self.metrics: Metrics = {}
        self.evaluated_at: int | None = None
        self.source: DataSource | None = None
        """The training data, in which the cause of a loss that is no number is looked for."""
        self._sampler = sampler
        self._task = task

    @property
    def evaluated(self) -> bool:
        return self.evaluated_at == self.step

    @property
    def position(self) -> int | None:
        return position_of(self.step, evaluated=self.evaluated) if self.has_state else None

    @property
    def monitored_value(self) -> float | None:
        return self.best.value_at(self.step)

    # ---- steps ----

    def record_commit(self, committed: Committed, *, step: int, lr: float) -> None:
        samples = self._advance(committed.loss, step)
        self.activity.begin("telling", step)
        self.stats.add_bytes(committed.bytes_sent, committed.bytes_plain)
        if not self._ends_with(step, lr=lr, samples=samples):
            self.stats.record_step(step, loss=self.loss, lr=lr, samples=samples)

    def record_streamed_commit(self, loss: Tensor, *, step: int, lr: float) -> None:
        samples = self._advance(loss, step)
        if not self._ends_with(step, lr=lr, samples=samples):
            self.stats.notify_watchers(step, loss=self.loss, lr=lr, samples=samples)

    def _advance(self, loss: Tensor, step: int) -> int:
        """Count one commit. Returns its number of samples."""
        samples = sum(map(self._sampler.batch_samples, range(self.step, step)))
        self.step = step
        self.loss = float(loss)
        return samples

    def _ends_with(self, step: int, *, lr: float, samples: int) -> bool:
        """Whether the loss is not finite, and a watcher ends the run for that. SH403 if none does."""
        if math.isfinite(self.loss):
            return False
        self.stats.notify_watchers(step, loss=self.loss, lr=lr, samples=samples)
        if not self.reporter.stop_reason:
            message, sample = f"the loss is {self.loss} at step {step}", self._broken_sample(step)
            if sample is not None:
                message += f": sample {sample} of the data has a NaN or an infinite number among its inputs"
            fix = "Correct that sample, or leave it out of the dataset." if sample is not None else ""
            raise error("SH403", message, where=self.reporter.stream.who, fix=fix)
        return True

    def _broken_sample(self, step: int) -> int | None:
        """A sample of the step with a number that is not finite, as the source has it. Only a failing run asks."""
        with contextlib.suppress(Exception):  # the loss is what the run fails of, whatever the data does now
            for lane in range(self._sampler.lanes):
                ids = self._sampler.ids(step - 1, lane)
                for value in self.source.take(ids).inputs if self.source is not None else ():
                    finite = torch.isfinite(value).reshape(len(ids), -1).all(1)
                    if not finite.all():
                        return int(ids[int((~finite).nonzero()[0])])
        return None

    def flush(self, lr: float) -> None:
        """Report all steps so far."""
        self.stats.flush(self.step, loss=self.loss, lr=lr)

    # ---- evaluations ----

    def record_evaluation(self, metrics: Metrics) -> None:
        """Record the validation metrics of this step."""
        self.metrics, self.evaluated_at = metrics, self.step
        if self.best.improved:
            self.reporter.report_from_leader(
                "best", step=self.step, metric=self.best.monitor.metric, value=self.best.value
            )

    def record_streamed_evaluation(self, metrics: Metrics) -> None:
        fields = {"split": "validation", "metrics": metrics, "evaluation_s": 0.0}
        self.reporter.notify_watchers(Event("evaluated", time.time(), self.reporter.stream.who, self.step, fields))
        self.record_evaluation(metrics)

    # ---- state ----

    def state(self) -> dict[str, Any]:
        """The `loop` section of a checkpoint. The strategy fills `sync`."""
        return {
            "step": self.step,
            "stop": self.reporter.stop_reason,
            "metrics": self.metrics,
            "measured_at": self.evaluated_at,
            "task": self._task.state(),
            "watch": self.reporter.state(),
            "sync": None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._task.load_state(state["task"])
        self.reporter.load_state(state["watch"])
        self.reporter.stop_reason = state["stop"]
        self.metrics, self.evaluated_at = state["metrics"], state["measured_at"]
        self.step = state["step"]
