"""What a worker computes that holds a model together with others: they run it at the same time, equally often."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from shoal.checkpoint.state_format import pack_state, unpack_state
from shoal.collectives.outcome import Discarded
from shoal.data.batch import Batch
from shoal.data.datasets import DatasetSplit
from shoal.lanes.lane_sum import LaneSum
from shoal.lanes.reduction_tree import TreeSum
from shoal.net.errors import LinkError
from shoal.sharding.replica import ShardedReplica
from shoal.strategies.sharded_commit import ShardedSync
from shoal.tasks.metrics import merge_lanes
from shoal.tasks.user_errors import wrap_user_errors

if TYPE_CHECKING:
    from shoal.sharding.build_replica import ShardedReplicaBuilder
    from shoal.train.loop import Loop

LOCKSTEP_PHASE = "together"
"""Of a worker's pulse: whoever is slow makes its whole row slow, and nobody can tell from outside who it is."""
_LABEL_EVALUATION = 1 << 57  # labels that nobody else uses


class ShardedCompute:
    """Belongs to the training thread."""

    def __init__(self, loop: Loop, sync: ShardedSync, replica_builder: ShardedReplicaBuilder) -> None:
        self._loop = loop
        self._sync = sync
        self._builder = replica_builder

    # ---- training ----

    def run_lanes(self, sums: TreeSum[LaneSum]) -> None:
        """One lane after the other. Who has none at a turn, or one without samples, runs the model all the same, for
        the others in its row; that does not count. LinkError if one of them is lost."""
        loop, clock = self._loop, time.perf_counter
        total = loop.sampler.batch_samples(loop.step)
        for index in range(self._sync.passes_per_step):
            t0 = clock()
            lane = loop.lanes[index] if index < len(loop.lanes) else None
            loop.activity.begin("data", loop.step)
            batch = None if lane is None else loop.batches.get(loop.step, lane)
            t1 = clock()
            loop.stats.add_time("data_s", t1 - t0)
            loop.activity.begin(LOCKSTEP_PHASE, loop.step)
            if batch is not None and self._counts_samples:
                loop.stats.add_samples(batch.size)
            sums.push_lane(index, self._forward_backward(lane, batch, total))
            loop.stats.add_time("compute_s", clock() - t1)

    def _forward_backward(self, lane: int | None, batch: Batch | None, total: int) -> LaneSum:
        loop = self._loop
        number = loop.train_schedule.lanes if lane is None else lane
        share = 0.0 if batch is None else batch.size / total
        with wrap_user_errors("SH401", f"step {loop.step}, lane {number}"), self._sync.as_link_errors():
            return loop.replica.forward_backward(loop.step, number, batch or self._builder.example, share=share)

    @property
    def _counts_samples(self) -> bool:
        """Where members of a row have the same lanes, one of them tells."""
        mesh = self._sync.shard_mesh
        assert mesh is not None
        return mesh.shard_rank == 0 or not self._replica.sharded_model.shares_lane

    @property
    def _replica(self) -> ShardedReplica:
        assert isinstance(self._loop.replica, ShardedReplica)
        return self._loop.replica

    # ---- evaluation ----

    @torch.no_grad()
    def evaluate(self, split: DatasetSplit, label: int) -> dict[str, float] | Discarded:
        """All of a part of the data, by all members. LinkError if one is lost."""
        loop, evaluator = self._loop, self._loop.evaluator
        loop.activity.begin(LOCKSTEP_PHASE, loop.step)
        mesh = self._sync.shard_mesh
        assert mesh is not None
        mine = evaluator.chunks_of(split, loop.lanes)
        row = [seat for seat, rank in loop.view.places.items() if rank // mesh.replica_size == mesh.replica_rank]
        passes = max(len(evaluator.chunks_of(split, loop.view.carries[seat])) for seat in row)
        has_output = (
            not self._replica.sharded_model.shares_lane or mesh.shard_rank == mesh.replica_size - 1
        )  # the end of a pipeline
        with self._sync.as_link_errors():
            found = evaluator.accumulate_in_lockstep(
                self._replica,
                split,
                mine,
                passes=passes,
                has_output=has_output,
                evaluate_batch=self._evaluate_batch,
                on_chunk=self._on_chunk,
            )
        if self._sync.aborted():
            return Discarded("asked to stop")
        lanes = {lane: one.state() for lane, one in found.items() if lane >= 0}
        results = self._sync.gather(_LABEL_EVALUATION + 8 * loop.step + 2 * label, pack_state(lanes))
        if isinstance(results, Discarded):
            return results
        metrics: dict[str, float] = {}
        if found:
            template = next(iter(found.values()))
            whole = {
                lane: template.with_state(state)
                for content in results.values()
                for lane, state in unpack_state(content).items()
            }
            metrics = merge_lanes([whole[lane] for lane in sorted(whole)])
        results = self._sync.gather(_LABEL_EVALUATION + 8 * loop.step + 2 * label + 1, pack_state(metrics))
        if isinstance(results, Discarded):
            return results
        return next(dict(result) for content in results.values() if (result := unpack_state(content)))

    def _on_chunk(self) -> None:
        self._loop.activity.begin(LOCKSTEP_PHASE, self._loop.step)
        if self._sync.aborted():
            raise LinkError("asked to stop")

    def _evaluate_batch(self, batch: Batch, doing: str) -> tuple[Any, Any]:
        """Loss and predictions. In a pipeline the model can be called once at a time."""
        task, sharded_model, replica = self._builder.task, self._replica.sharded_model, self._replica
        with wrap_user_errors("SH401", doing), self._sync.as_link_errors(), replica.autocast_context():
            if sharded_model.shares_lane and not task.evaluates_in_one_pass:
                return sharded_model.forward(task.loss, batch), sharded_model.forward(task.predict, batch)
            found = sharded_model.forward(task.evaluate, batch)
            return (None, None) if found is None else found
