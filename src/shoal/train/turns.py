"""What a worker computes that holds a model together with others: they run it at the same time, equally often."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from shoal.checkpoint.live import pack, unpack
from shoal.data.assemble import Part
from shoal.data.batch import Batch
from shoal.parallel.lane_sum import LaneSum
from shoal.parallel.shard.replica import ShardedReplica
from shoal.parallel.sync.base import Discarded
from shoal.parallel.sync.grid import GridSync
from shoal.parallel.tree import TreeSum
from shoal.train.blame import blaming
from shoal.train.metrics import merge
from shoal.wire.handshake import LinkError

if TYPE_CHECKING:
    from shoal.train.forming import Mould
    from shoal.train.loop import Loop

PHASE = "together"
"""Of a worker's pulse: whoever is slow makes its whole row slow, and nobody can tell from outside who it is."""
_MEASURED = 1 << 57  # labels that nobody else uses


class Turns:
    """Belongs to the training thread."""

    def __init__(self, loop: Loop, sync: GridSync, mould: Mould) -> None:
        self._loop = loop
        self._sync = sync
        self._mould = mould

    # ---- training ----

    def compute(self, sums: TreeSum[LaneSum]) -> None:
        """One lane after the other. Who has none at a turn, or one without samples, runs the model all the same, for
        the others in its row; that does not count. LinkError if one of them is lost."""
        loop, clock = self._loop, time.perf_counter
        total = loop.dealer.total(loop.step)
        for turn in range(self._sync.turns):
            t0 = clock()
            lane = loop.lanes[turn] if turn < len(loop.lanes) else None
            loop.pulse.enter("data", loop.step)
            batch = None if lane is None else loop.feed.get(loop.step, lane)
            t1 = clock()
            loop.progress.spent("data_s", t1 - t0)
            loop.pulse.enter(PHASE, loop.step)
            if batch is not None and self._counts:
                loop.progress.computed(batch.size)
            sums.lane(turn, self._lane(lane, batch, total))
            loop.progress.spent("compute_s", clock() - t1)

    def _lane(self, lane: int | None, batch: Batch | None, total: int) -> LaneSum:
        loop = self._loop
        number = loop.course.lanes if lane is None else lane
        share = 0.0 if batch is None else batch.size / total
        with blaming("SH401", f"step {loop.step}, lane {number}"), self._sync.talking():
            return loop.replica.forward_backward(loop.step, number, batch or self._mould.example, share=share)

    @property
    def _counts(self) -> bool:
        """Where members of a row have the same lanes, one of them tells."""
        grid = self._sync.grid
        assert grid is not None
        return grid.seat == 0 or not self._replica.cut.together

    @property
    def _replica(self) -> ShardedReplica:
        assert isinstance(self._loop.replica, ShardedReplica)
        return self._loop.replica

    # ---- evaluation ----

    @torch.no_grad()
    def evaluate(self, part: Part, label: int) -> dict[str, float] | Discarded:
        """All of a part of the data, by all members. LinkError if one is lost."""
        loop, evaluator = self._loop, self._loop.evaluator
        loop.pulse.enter(PHASE, loop.step)
        grid = self._sync.grid
        assert grid is not None
        mine = evaluator.chunks_of(part, loop.lanes)
        row = [seat for seat, rank in loop.view.places.items() if rank // grid.ways == grid.row]
        turns = max(len(evaluator.chunks_of(part, loop.view.carries[seat])) for seat in row)
        speaks = not self._replica.cut.together or grid.seat == grid.ways - 1  # the end of a pipeline
        with self._sync.talking():
            found = evaluator.in_turns(
                self._replica, part, mine, turns=turns, speaks=speaks, look=self._look, each=self._each
            )
        if self._sync.aborted():
            return Discarded("asked to stop")
        lanes = {lane: one.state() for lane, one in found.items() if lane >= 0}
        told = self._sync.gather(_MEASURED + 8 * loop.step + 2 * label, pack(lanes))
        if isinstance(told, Discarded):
            return told
        metrics: dict[str, float] = {}
        if found:
            template = next(iter(found.values()))
            whole = {lane: template.like(state) for content in told.values() for lane, state in unpack(content).items()}
            metrics = merge([whole[lane] for lane in sorted(whole)])
        told = self._sync.gather(_MEASURED + 8 * loop.step + 2 * label + 1, pack(metrics))
        if isinstance(told, Discarded):
            return told
        return next(dict(result) for content in told.values() if (result := unpack(content)))

    def _each(self) -> None:
        self._loop.pulse.enter(PHASE, self._loop.step)
        if self._sync.aborted():
            raise LinkError("asked to stop")

    def _look(self, batch: Batch, doing: str) -> tuple[Any, Any]:
        """Loss and predictions. In a pipeline the model can be called once at a time."""
        task, cut, replica = self._mould.task, self._replica.cut, self._replica
        with blaming("SH401", doing), self._sync.talking(), replica.casting():
            if cut.together and not task.evaluates_at_once:
                return cut.look(task.loss, batch), cut.look(task.predict, batch)
            found = cut.look(task.evaluate, batch)
            return (None, None) if found is None else found
