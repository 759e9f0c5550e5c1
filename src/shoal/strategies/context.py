"""What strategies need from the worker, as one frozen value. The worker makes it; strategies only use it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from shoal.checkpoint.store import CheckpointStore
from shoal.collectives.outcome import Committed
from shoal.collectives.peer_services import PeerServices
from shoal.data.batch_loader import BatchLoader
from shoal.data.samplers import LaneSampler
from shoal.spec.chunk_table import ChunkTable
from shoal.tasks.evaluation import Evaluator
from shoal.tasks.task import Task

Metrics = dict[str, float]
PlaceChunks = Callable[[list[int], Callable[[ChunkTable], None]], None]
"""Tells the driver where parameters may be cut, and calls back, from any thread, with each chunk table."""


class ActivityRecorder(Protocol):
    """What the training thread is doing, for the heartbeat."""

    def begin(self, phase: str, step: int) -> None: ...

    def record_lane_time(self, seconds: float) -> None: ...


class StepRecorder(Protocol):
    """Statistics of a step: time by phase, samples, and bytes sent."""

    def add_time(self, name: str, seconds: float) -> None: ...

    def add_samples(self, samples: int) -> None: ...

    def add_bytes(self, size_bytes: int, plain_bytes: int | None = None) -> None: ...

    def record_inner_step(self, step: int, *, loss: float, lr: float, emit: bool = True) -> None: ...


class RunProgress(Protocol):
    """A worker's progress besides its weights: step, evaluations, watchers, the task's own state.

    The strategy keeps it in step with the weights: it records every commit, whether this worker computed it or got it
    from others, and saves and loads both together. `has_state` is false while the worker holds no valid state.
    """

    step: int
    has_state: bool

    @property
    def evaluated(self) -> bool:
        """Are the validation metrics of this step known?"""

    @property
    def position(self) -> int | None: ...

    @property
    def monitored_value(self) -> float | None:
        """The monitored metric at this step, if it was measured."""

    def record_commit(self, committed: Committed, *, step: int, lr: float) -> None:
        """Record a commit that leads to `step` and that this worker took part in."""

    def record_streamed_commit(self, loss: Tensor, *, step: int, lr: float) -> None:
        """Record a commit that leads to `step`, that other workers made and this worker has applied."""

    def record_streamed_evaluation(self, metrics: Metrics) -> None:
        """Record the validation metrics that other workers measured at this step."""

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class StepContext:
    """Everything here belongs to the training thread, and outlives the strategy."""

    sampler: LaneSampler
    batches: BatchLoader
    task: Task
    evaluator: Evaluator
    store: CheckpointStore
    peers: PeerServices
    progress: RunProgress
    activity: ActivityRecorder
    stats: StepRecorder
    report: Callable[..., object]
    place_chunks: PlaceChunks
