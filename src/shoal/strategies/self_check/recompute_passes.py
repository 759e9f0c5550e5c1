"""The same for steps in several passes: the new objects take the whole step again.

They compute one lane in every pass, and get the sums over all lanes that the training objects got. So they make the
same updates between the passes, unless they depend on something that no checkpoint holds.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from shoal.data.batch import Batch
from shoal.errors import ShoalError
from shoal.lanes.lane_sum import LaneSum
from shoal.lanes.passes import ComputeLane, MultiPassReplica, PhasedReplica
from shoal.lanes.replica import Replica
from shoal.strategies.self_check.recompute import (
    FreshObjects,
    Recomputed,
    Recorder,
    batch_sha256,
    copied,
    copy_of_total,
    lane_sha256,
    settings_of,
)


class PassRecorder(Recorder):
    """A PassObserver that keeps digests of one lane in all passes of a step, and the sums over all lanes."""

    def __init__(self, lane: int, *, replica: MultiPassReplica, room_bytes: int) -> None:
        super().__init__(-1, lane, replica=replica, keep_total=False)
        self._passing, self._room_bytes = replica, room_bytes
        self._digests: list[str] = []
        self.totals: list[LaneSum | None] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        self._passing.pass_observer = self
        try:
            yield
        finally:
            self._passing.pass_observer = None

    def lane_passed(self, lane: int, batch: Any, result: LaneSum | None) -> None:
        if lane != self._lane or self.failure:
            return
        try:
            self._digests.append(_pass_sha256(self._passing, lane, result))
            self.batch = self.batch or batch_sha256(batch)
        except ShoalError as problem:
            self.failure = f"a gradient has no digest: {problem.message}"
        self.lane_sum = _digest_of_all(self._digests)

    def pass_summed(self, total: LaneSum | None) -> None:
        if self.failure:
            return
        if total is not None:
            self._room_bytes -= sum(grad.numel() * grad.element_size() for grad in total.grads)
        if self._room_bytes < 0:
            self.failure = "the sums of the passes of a step do not fit into the free memory"
            self.totals.clear()
        else:
            self.totals.append(None if total is None else copy_of_total(total))


class PassReplay:
    """See Passes: one lane is computed, and the sums are those that were recorded."""

    keeps_undo = False

    def __init__(self, replica: Replica, lane: int, *, share: float, totals: Sequence[LaneSum | None]) -> None:
        self._replica, self._lane, self._share, self._totals = replica, lane, share, totals
        self._batch: Batch | None = None
        self._number = 0
        self._digests: list[str] = []
        self.lanes_change_settings = False

    @property
    def lane_sum(self) -> str:
        return _digest_of_all(self._digests)

    def take(self, step: int, replica: MultiPassReplica, batch: Batch | None) -> bool:
        """Whether the step has as many passes as it had."""
        self._batch = None if batch is None else batch.to(replica.device)
        replica.begin_step()
        try:
            replica.take_step(step, self)
        except _FurtherPassError:
            return False
        return self._number == len(self._totals)

    def total(self, compute: ComputeLane) -> LaneSum | None:
        if self._batch is not None:
            settings = settings_of(self._replica)
            result = compute(self._lane, self._batch, self._share)
            self.lanes_change_settings |= settings_of(self._replica) != settings
            self._digests.append(_pass_sha256(self._replica, self._lane, result))
        if self._number == len(self._totals):
            raise _FurtherPassError
        total = self._totals[self._number]
        self._number += 1
        return None if total is None else copy_of_total(total)


class FreshPasses(FreshObjects):
    """See FreshObjects."""

    replica: MultiPassReplica

    def __init__(self, rebuild: Any, own_task: Any, own: MultiPassReplica, **options: Any) -> None:
        super().__init__(rebuild, own_task, own, **options)
        self._state = copied(own.state())
        if isinstance(own, PhasedReplica) and isinstance(self.replica, PhasedReplica):
            self.replica.phases = own.phases  # from the first batch

    def compute_again(self, lane: int, batch: Batch | None, share: float, recorder: Recorder) -> Recomputed:
        assert isinstance(recorder, PassRecorder)
        digest = "" if batch is None else batch_sha256(batch)
        sums: list[str] = []
        differs: list[str] = []
        with self._undisturbed():
            for attempt in (batch, copy.deepcopy(batch)):
                replay = PassReplay(self.replica, lane, share=share, totals=recorder.totals)
                has_same_passes = replay.take(self._step, self.replica, attempt)
                self._lanes_change_settings |= replay.lanes_change_settings
                if not sums:
                    differs = self._differences() if has_same_passes else ["the number of its passes"]
                sums.append(replay.lane_sum)
                self.replica.load_state(copied(self._state))
        return Recomputed([] if batch is None else sums, digest, differs)


class _FurtherPassError(Exception):
    """The step asks for a pass that it did not have."""


def _pass_sha256(replica: Replica, lane: int, result: LaneSum | None) -> str:
    return "nothing" if result is None else lane_sha256(replica, lane, result)


def _digest_of_all(digests: Sequence[str]) -> str:
    return hashlib.sha256(" ".join(digests).encode()).hexdigest() if digests else ""
