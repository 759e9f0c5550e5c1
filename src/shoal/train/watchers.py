"""Watchers: objects with one method, `watch(event)`, that observe a run.

`watch` may return a reason to stop the run. A watcher that must remember something across a crash has `state()` and
`load_state(state)`. Every worker calls its own copy with the same losses and metrics, and its decisions may depend on
nothing else. A watcher that writes output sets `alone = True`: then only one worker at a time calls it.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Protocol

from shoal.errors import error
from shoal.events import Event
from shoal.spec.job import EarlyStoppingConfig, MonitorConfig


class Watcher(Protocol):
    def watch(self, event: Event) -> str | None:
        """Look at what happened; return a reason to stop, or None."""


def monitored_value(monitor: MonitorConfig, event: Event) -> float | None:
    """The monitored value, if this event has one."""
    if event.kind != "evaluated" or event["split"] != "validation":
        return None
    metrics = event["metrics"]
    if monitor.metric not in metrics:
        known = ", ".join(sorted(metrics))
        raise error(
            "SH409",
            f"no metric is called '{monitor.metric}'",
            where="best/stop_early",
            fix=f"Use one of: {known}.",
        )
    return float(metrics[monitor.metric])


class BestMetric:
    """Remembers the best and the last value of the monitored metric. `improved`: the last value is a new best."""

    def __init__(self, monitor: MonitorConfig) -> None:
        self.monitor = monitor
        self.value: float | None = None
        self.step: int | None = None
        self.last: tuple[int | None, float | None] = (None, None)
        self.improved = False

    def watch(self, event: Event) -> str | None:
        value = monitored_value(self.monitor, event)
        if value is not None:
            self.last = (event.step, value)
            self.improved = math.isfinite(value) and (
                self.value is None or self.monitor.sign * (value - self.value) > 0
            )
            if self.improved:
                self.value, self.step = value, event.step
        return None

    def value_at(self, step: int) -> float | None:
        """The value measured at this step, if any. A value of another step belongs to other weights."""
        measured_at, value = self.last
        return value if measured_at == step else None

    def state(self) -> dict[str, Any]:
        return {"value": self.value, "step": self.step, "last": self.last}

    def load_state(self, state: dict[str, Any]) -> None:
        self.value, self.step, self.last = state["value"], state["step"], state["last"]


class EarlyStopping:
    """Asks to stop when the monitored metric has not improved for `patience` evaluations."""

    def __init__(self, spec: EarlyStoppingConfig) -> None:
        self.spec = spec
        self.best: float | None = None
        self.evaluations_without_improvement = 0

    def watch(self, event: Event) -> str | None:
        value = monitored_value(self.spec, event)
        if value is None:
            return None
        if math.isfinite(value) and (self.best is None or self.spec.sign * (value - self.best) > self.spec.min_delta):
            self.best, self.evaluations_without_improvement = value, 0
            return None
        self.evaluations_without_improvement += 1
        if self.evaluations_without_improvement < self.spec.patience:
            return None
        best = "" if self.best is None else f" on {self.best:.6g}"
        return f"{self.spec.metric} has not improved{best} for {self.evaluations_without_improvement} evaluations"

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.evaluations_without_improvement}

    def load_state(self, state: dict[str, Any]) -> None:
        self.best, self.evaluations_without_improvement = state["best"], state["waited"]


class TensorBoard:
    """Writes losses and metrics for TensorBoard: `watchers: [tensorboard]`. Each worker that writes begins a file that
    hides what earlier ones wrote of its first step and later ones: those steps are computed again."""

    alone = True

    def __init__(self, directory: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as failure:
            raise error(
                "SH207", "TensorBoard is not installed", where="watchers", fix="pip install 'shoal[tensorboard]'"
            ) from failure
        self._open = partial(SummaryWriter, directory)
        self._writer: Any = None

    def watch(self, event: Event) -> str | None:
        if event.kind in ("step", "evaluated") and self._writer is None:
            self._writer = self._open(purge_step=event.step)
        if event.kind == "step":
            self._writer.add_scalar("train/loss", event["loss"], event.step)
            self._writer.add_scalar("train/lr", event["lr"], event.step)
        elif event.kind == "evaluated":
            for name, value in event["metrics"].items():
                self._writer.add_scalar(f"{event['split']}/{name}", value, event.step)
        elif event.kind in ("finished", "left") and self._writer is not None:
            self._writer.close()
            self._writer = None
        return None
