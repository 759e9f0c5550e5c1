"""What a watcher that looks at training itself gets: the worker's model, optimizer and batches.

Such a watcher has a method `attach(worker)`. Besides the events of the run, its `watch` gets three that are never
written: `before_step`, `batch` (with `lane` and `batch`) and `before_evaluation` (with `split`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from shoal.data.batch import Batch
from shoal.errors import error
from shoal.events import Event
from shoal.train.reporting import Reporter


@dataclass(frozen=True)
class AttachedWorker:
    """This worker's own objects. A watcher may look at them; what it changes must be the same on every worker.

    `optimizers` are all of a Task with several, in the order of the Task; `optimizer` is the first.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    device: torch.device
    directory: str
    steps: int
    """Those of the whole run."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.optimizers[0]


class Batches(Protocol):
    """The batches of a run; see `data.batch_loader.BatchLoader`."""

    def set_lanes(self, lanes: Sequence[int], step: int) -> None: ...

    def get(self, step: int, lane: int) -> Batch | None: ...

    def close(self) -> None: ...


class WatchedBatches:
    """Shows each batch to the watchers before the lane is computed."""

    def __init__(self, batches: Batches, watch: WatchLocally) -> None:
        self._batches = batches
        self._watch = watch

    def set_lanes(self, lanes: Sequence[int], step: int) -> None:
        self._batches.set_lanes(lanes, step)

    def get(self, step: int, lane: int) -> Batch | None:
        batch = self._batches.get(step, lane)
        if batch is not None:
            self._watch("batch", step, lane=lane, batch=batch)
        return batch

    def close(self) -> None:
        self._batches.close()


class WatchLocally:
    """Shows events that are never written to the watchers that are attached."""

    def __init__(self, reporter: Reporter, watchers: Sequence[Any]) -> None:
        self._reporter = reporter
        self._watchers = [watcher for watcher in watchers if hasattr(watcher, "attach")]

    def __bool__(self) -> bool:
        return bool(self._watchers)

    def __call__(self, kind: str, step: int, **fields: Any) -> None:
        if self._watchers:
            event = Event(kind, time.time(), self._reporter.stream.who, step, fields)
            self._reporter.notify_watchers(event, self._watchers)

    def attach(self, worker: AttachedWorker | None) -> None:
        """SH110 if the worker has no whole model to attach to."""
        for watcher in self._watchers:
            if worker is None:
                message = f"the watcher {type(watcher).__name__} looks at the whole model, and the job shards it"
                raise error("SH110", message, where="watchers")
            watcher.attach(worker)
