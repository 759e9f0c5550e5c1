"""The strategy seam: how a worker holds weights, and makes one committed step with the others.

The loop decides when to step, evaluate, save and stop; a strategy knows how. Failure is a value here: a step counts, or
it is discarded with a reason, and then a new view follows.
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
    """What the loops must know of a strategy."""

    exact: bool
    """Do workers at the same position always have the same bits?"""
    lockstep: bool
    """Do all members take every step at the same time? Else each of them may stop at a boundary of its own."""


@dataclass(frozen=True)
class FinalModel:
    """What a finished run hands to the member that leads: digests for the receipt, and a way to export."""

    weights_sha256: str
    state_sha256: str
    export: Callable[..., object]
    """`export(directory, example_inputs=…, program=…, emit=…, info=…)`."""


class Strategy(Protocol):
    """How this worker holds weights and makes one committed step with the others.

    Loop and ElasticLoop call it from the training thread; `abort` and `moved_bytes` may come from any thread. It owns
    the weights and everything that changes them, and keeps the context's `progress` in step with them.

    It never raises LinkError. Where another member is lost, the answer is Discarded: the weights are those of the last
    commit, nothing more comes of this view, and `enter` follows with a newer one. A ShoalError passes through and ends
    this worker.
    """

    @property
    def traits(self) -> Traits: ...

    @property
    def lr(self) -> float:
        """The learning rate of the next step; nan while there are no weights."""

    @property
    def is_saved(self) -> bool:
        """Does a checkpoint hold everything that this worker holds, as far as it knows?"""

    def enter(self, view: View, seat: int) -> Discarded | None:
        """Come to hold what the view starts from, and meet its members. `seat` carries lanes in the view."""

    def follow(self, view: View, seat: int) -> Iterator[bool]:
        """Catch up with the view's source while it goes on training. Yields within a moment each time, True where this
        worker has everything so far; ends where there is nothing to follow. May be left at any time: `enter` goes on
        from there."""

    def run_step(self, must_halt: Callable[[], bool]) -> Committed | Discarded:
        """Compute, agree, update: one commit. If `must_halt()` is true at any member, `halt` is set for all members."""

    def leave_view(self) -> Discarded | None:
        """By all members, after a commit with `halt`: hold nothing that others could not get without this worker."""

    def evaluate(self, split: DatasetSplit) -> Metrics | Discarded:
        """All of a held-out part, by all members together. The answer is the same for every member."""

    def adopt_metrics(self, metrics: Metrics, monitored: float | None) -> None:
        """The validation part was measured at this step, and counts: learning-rate schedules may depend on it."""

    def save(self, *, force: bool = False) -> None:
        """Called by all members at the same boundary: save if it is time or forced. If a member is lost, the next step
        finds out."""

    def save_alone(self) -> None:
        """By one member, without the others: save the last commit now. Does nothing where that takes all members."""

    def restore(self) -> int | None:
        """Before any view: hold what the newest valid checkpoint has, or else the job's start. Returns the step of the
        checkpoint. Does nothing where members restore together when they enter a view."""

    def finish(self, conclude: Callable[[FinalModel], None]) -> Discarded | None:
        """After the last step, by all members. The one that saves gets the model to conclude with; the others stay
        until it has. May be repeated in another view."""

    def hand_over(self, given_up: Callable[[], bool]) -> None:
        """Before leaving while others go on: until they have what only this worker holds, or `given_up()`."""

    def state(self) -> State | None:
        """The weights and what changes them, as references; None where no single worker has all of it."""

    def abort(self, view: int) -> None:
        """A thread that waits for members of this view, or of an older one, comes back within milliseconds with
        Discarded, and one that would wait does not. Later views are not touched."""

    def moved_bytes(self) -> int:
        """A number that changes as long as something gets through to other members or servers, or from them."""

    def close(self) -> None:
        """Leave for good, and free connections and shared memory. Nothing may be called afterwards."""


class HeldWeights(Protocol):
    """A whole set of weights, as a GradientSync sees it: a Replica, or lanes of local SGD around one."""

    @property
    def device(self) -> torch.device: ...

    @property
    def layout(self) -> FlatLayout:
        """How sums lie in a flat buffer, and how it is cut."""

    def sum_template(self) -> LaneSum:
        """Tensors of the shapes and kinds that a lane's sum has."""

    def begin_step(self) -> None: ...

    def undo_step(self) -> None:
        """A step that was begun does not count."""

    def apply(self, step: int, total: LaneSum) -> torch.Tensor:
        """One update from the sum over all lanes. Returns the loss of the step."""

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: dict[str, Any]) -> None: ...


class GradientSync(Protocol):
    """How replicas agree on the sum of a step's lanes. Three verbs: reconfigure (until `close`), commit (what was begun
    with `begin_step`), state (and back).

    Belongs to the strategy and its thread. The view's group is made elsewhere and given to it; an abort comes through
    the group. Never raises LinkError but from `state`.
    """

    exact: bool
    """Do replicas at the same position always have the same bits?"""

    def reconfigure(self, view: View, seat: int) -> Discarded | None:
        """Another view counts from now on. Returns when all its members have come so far."""

    def close(self) -> None:
        """Leave for good."""

    def begin_step(self) -> TreeSum[LaneSum]:
        """A step begins. The tree takes the lanes of this worker, in rising order, each as soon as it is there."""

    def gradient_sink(
        self, held: HeldWeights, step: int, sums: TreeSum[LaneSum], lane: int, *, halt: bool
    ) -> GradientSink | None:
        """Before the last of this worker's lanes, if it has samples: takes the lane's gradients as backward finishes
        them. None where nothing is gained by that. All other lanes are in `sums`. `commit` follows, with the same
        `halt`."""

    def commit(
        self, held: HeldWeights, step: int, sums: TreeSum[LaneSum], *, halt: bool = False
    ) -> Committed | Discarded:
        """Agree on the sum and apply it, once per step. `halt` lets all members know that one of them must stop."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs besides the replica, the other members' part of it too. Not for peers: they get it
        when they enter a view. LinkError if it cannot be had now."""

    def load_state(self, step: int, state: dict[str, Any]) -> None:
        """From a checkpoint at this step."""

    def hand_over(self, given_up: Callable[[], bool]) -> None:
        """Before leaving while others go on: until they have the part of the state that only this worker holds."""
