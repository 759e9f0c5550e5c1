"""Sync: how replicas agree on a step. Failure is a value here: a step counts, or it is discarded with a reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from shoal.collectives.outcome import Committed, Discarded
from shoal.lanes.reduction_tree import TreeSum
from shoal.lanes.replica import GradientSink, LaneSum, Replica, add
from shoal.spec.view import View


class GradientSync(Protocol):
    """Used by the loop's thread, except for `abort`. `tap` is shown the total of each step before it is applied, if
    there is one."""

    on_total: Callable[[int, LaneSum], None] | None
    exact: bool
    """Do replicas at the same position always have the same bits?"""
    lockstep: bool
    """Do all members take every step at the same time?"""
    streams_updates: bool
    """Is there a total to be shown?"""

    def reconfigure(self, view: View, seat: int) -> str:
        """Another view counts from now on. Returns '' when all its members have come so far,
        or why that failed."""

    def first_step(self, step: int, lanes: Sequence[int]) -> int:
        """After a view was entered at this step: where a worker goes on that carries these lanes."""

    def needs_lane(self, step: int, lane: int) -> bool:
        """Is this lane's part of the step still to be done?"""

    def begin_step(self) -> TreeSum[LaneSum]:
        """A step begins: what takes the lanes of this worker, in rising order, each as soon as it is there."""

    def lane_weight(self, lane: int, size: int, total: int) -> float:
        """How much a lane's mean counts that has so many of the step's samples."""

    def gradient_sink(
        self, replica: Replica, step: int, sums: TreeSum[LaneSum], lane: int, *, halt: bool
    ) -> GradientSink | None:
        """Before the last of this worker's lanes, if it has samples: who takes its gradients as backward finishes them,
        or None where nothing is gained by that. All other lanes are in `sums`. `commit` follows, with the same `halt`.
        """

    def commit(
        self, replica: Replica, step: int, sums: TreeSum[LaneSum], *, halt: bool = False
    ) -> Committed | Discarded:
        """Agree on the sum and apply it, once per step. `halt` lets all members know that one of them must stop."""

    def gather(self, label: int, content: bytes) -> dict[int, bytes] | Discarded:
        """Everybody's content, by seat. Members make the same calls in the same order; `label` proves it."""

    def abort(self, view: int) -> None:
        """From any thread: whoever waits for the members of this view comes back within milliseconds, and whoever
        would wait does not. Later views are not touched."""

    def aborted(self) -> bool:
        """Was the present view aborted? From any thread."""

    def moved_bytes(self) -> int:
        """A number that grows as long as something gets through to other members, or from them; less than before when
        another view has begun. From any thread."""

    def barrier(self, replica: Replica, label: int) -> Discarded | None:
        """Before all look at the weights together: everybody has come so far, and has the same."""

    def pull_state(self, replica: Replica, step: int) -> Discarded | None:
        """Bring into the replica what is held elsewhere, so that it can be saved."""

    def hand_over(self, given_up: Callable[[], bool]) -> None:
        """Before leaving while others go on: until they have what only this worker holds."""

    def external_sha256(self) -> str | Discarded:
        """A SHA-256 of what is trained and never comes into the replica; '' where there is nothing of the kind."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs besides the replica, the other members' part of it too. Not for peers: they get it
        when they enter a view. LinkError if it cannot be had now."""

    def blobs(self) -> dict[str, int]:
        """After `state`: what others have written for the checkpoint, with sizes in bytes."""

    def load_state(self, step: int, state: dict[str, Any]) -> None:
        """From a checkpoint at this step."""

    def close(self) -> None:
        """Leave for good."""


class LockstepDefaults:
    """What is simple where every replica takes every step with all others, and holds everything."""

    lockstep = True
    streams_updates = True

    def __init__(self, lanes: int) -> None:
        self.on_total: Callable[[int, LaneSum], None] | None = None
        self._lanes = lanes

    def first_step(self, step: int, lanes: Sequence[int]) -> int:
        return step

    def needs_lane(self, step: int, lane: int) -> bool:
        return True

    def begin_step(self) -> TreeSum[LaneSum]:
        return TreeSum(self._lanes, add)

    def lane_weight(self, lane: int, size: int, total: int) -> float:
        return size / total

    def moved_bytes(self) -> int:
        return 0

    def barrier(self, replica: Replica, label: int) -> Discarded | None:
        return None

    def pull_state(self, replica: Replica, step: int) -> Discarded | None:
        return None

    def hand_over(self, given_up: Callable[[], bool]) -> None:
        """What it holds, the others hold too."""

    def external_sha256(self) -> str | Discarded:
        return ""

    def state(self) -> dict[str, Any]:
        return {}

    def blobs(self) -> dict[str, int]:
        return {}

    def load_state(self, step: int, state: dict[str, Any]) -> None:
        """There is nothing."""
