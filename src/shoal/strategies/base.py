"""The strategy seam: how a worker holds weights, and makes one committed step with the other workers.

The loop decides when to step, evaluate, save and stop; a strategy knows how. Failure is a value here: a step is
committed, or it is discarded with a reason, and then a new view follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from shoal.checkpoint.state_tree import State
from shoal.collectives.outcome import Committed, Discarded
from shoal.data.datasets import DatasetSplit
from shoal.lanes.flat_layout import FlatLayout
from shoal.lanes.reduction_tree import TreeSum
from shoal.lanes.replica import GradientSink, LaneSum
from shoal.spec.view import View
from shoal.strategies.context import Metrics

__all__ = ["Committed", "Discarded", "FinalModel", "GradientSync", "HeldWeights", "Metrics", "Strategy", "Traits"]


class Traits(NamedTuple):
    """What the loops must know about a strategy."""

    exact: bool
    """Do workers at the same position always have the same bits?"""
    lockstep: bool
    """Do all members take every step at the same time? If not, each member may stop at a boundary of its own."""


@dataclass(frozen=True)
class FinalModel:
    """The model of a finished run, for the leader: digests for the receipt, and a function that exports the model."""

    weights_sha256: str
    state_sha256: str
    export: Callable[..., object]
    """`export(directory, example_inputs=…, program=…, emit=…, info=…)`."""


class Strategy(Protocol):
    """How this worker holds weights and makes one committed step with the other workers.

    Loop and ElasticLoop call it from the training thread; `abort` and `moved_bytes` may be called from any thread. It
    owns the weights and everything that changes them, and keeps the context's `progress` in step with them.

    It never raises LinkError. If another member is lost, a method returns Discarded: the weights are those of the last
    commit, the view is over, and `enter` follows with a newer one. A ShoalError passes through and ends this worker.
    """

    @property
    def traits(self) -> Traits: ...

    @property
    def lr(self) -> float:
        """The learning rate of the next step; nan while there are no weights."""

    @property
    def is_saved(self) -> bool:
        """Is everything that this worker holds in a checkpoint, as far as it knows?"""

    def enter(self, view: View, seat: int) -> Discarded | None:
        """Load the state that the view starts from, and connect to its members. `seat` carries lanes in the view."""

    def follow(self, view: View, seat: int) -> Iterator[bool]:
        """Catch up with the view's source while it continues to train. Yields at short intervals, True if this worker
        has everything so far. Ends when there is nothing to follow. The caller may stop at any time: `enter` continues
        from there."""

    def run_step(self, must_halt: Callable[[], bool]) -> Committed | Discarded:
        """Compute, agree, update: one commit. If `must_halt()` is true on any member, `halt` is set for all members."""

    def leave_view(self) -> Discarded | None:
        """Called by all members after a commit with `halt`. Afterwards the others need nothing from this worker."""

    def evaluate(self, split: DatasetSplit) -> Metrics | Discarded:
        """Evaluate a whole held-out split, together with all members. Every member gets the same metrics."""

    def adopt_metrics(self, metrics: Metrics, monitored: float | None) -> None:
        """Take the validation metrics of this step: learning-rate schedules may depend on them."""

    def save(self, *, force: bool = False) -> None:
        """Called by all members at one boundary: save if it is time or forced. The next step notices a lost member."""

    def save_alone(self) -> None:
        """Called by one member alone: save the last commit now. Does nothing if a save takes all members."""

    def restore(self) -> int | None:
        """Called before any view: load the newest valid checkpoint, or keep the job's initial state. Returns the step
        of the checkpoint. Does nothing if members restore together in `enter`."""

    def finish(self, conclude: Callable[[FinalModel], None]) -> Discarded | None:
        """Called by all members after the last step. The saver calls `conclude` with the model, and the others wait for
        it. May be repeated in another view."""

    def hand_over(self, given_up: Callable[[], bool]) -> None:
        """Before leaving a run that continues: wait until others have what only this worker holds, or `given_up()`."""

    def state(self) -> State | None:
        """References to the weights and to what changes them; None if no single worker holds all of it."""

    def abort(self, view: int) -> None:
        """Threads that wait for members of this view, or of an older one, return Discarded within milliseconds, and
        later calls do not wait. Newer views are not affected."""

    def moved_bytes(self) -> int:
        """A number that changes as long as data moves between this worker and other members or servers."""

    def close(self) -> None:
        """Leave for good, and free connections and shared memory. No method may be called afterwards."""


class HeldWeights(Protocol):
    """A whole set of weights, as a GradientSync sees it: a Replica, or the LocalReplica around one."""

    @property
    def device(self) -> torch.device: ...

    @property
    def layout(self) -> FlatLayout:
        """How a sum is laid out in a flat buffer, and where the buffer is cut."""

    def sum_template(self) -> LaneSum:
        """Tensors with the shapes and dtypes of a lane's sum."""

    def begin_step(self) -> None: ...

    def undo_step(self) -> None:
        """Undo a step that was begun and is not committed."""

    def apply(self, step: int, total: LaneSum) -> torch.Tensor:
        """Update the weights with the sum over all lanes. Returns the loss of the step."""

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


class GradientSync(Protocol):
    """How replicas agree on the sum of a step's lanes. Three verbs: `reconfigure` for a view, `commit` for a step that
    `begin_step` began, `state` and `load_state` for a checkpoint.

    Belongs to the strategy and its thread. It gets its view group from outside, and an abort comes through the group.
    Only `state` raises LinkError.
    """

    exact: bool
    """Do replicas at the same position always have the same bits?"""

    def reconfigure(self, view: View, seat: int) -> Discarded | None:
        """Switch to another view. Returns when all its members have done so."""

    def close(self) -> None:
        """Leave for good."""

    def begin_step(self) -> TreeSum[LaneSum]:
        """Begin a step. This worker pushes its lanes into the tree in rising order, each as soon as it is computed."""

    def gradient_sink(
        self, held: HeldWeights, step: int, sums: TreeSum[LaneSum], lane: int, *, halt: bool
    ) -> GradientSink | None:
        """Called before the last of this worker's lanes, if that lane has samples. All other lanes are in `sums`. The
        sink takes the lane's gradients as backward finishes them; None if that gains nothing. `commit` follows, with
        the same `halt`."""

    def commit(
        self, held: HeldWeights, step: int, sums: TreeSum[LaneSum], *, halt: bool = False
    ) -> Committed | Discarded:
        """Agree on the sum and apply it, once per step. `halt` tells all members that one of them must stop."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs besides the replica, including the other members' part. Peers do not need it: they
        get their part when they enter a view. LinkError if a member cannot be reached."""

    def load_state(self, step: int, state: dict[str, Any]) -> None:
        """Load the state of a checkpoint at this step."""

    def hand_over(self, given_up: Callable[[], bool]) -> None:
        """Before leaving a run that continues: wait until others have the state that only this worker holds."""
