"""What the members of a sharded model compute. They run the model at the same time, equally often."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.checkpoint.state_format import pack_state, unpack_state
from shoal.collectives.group import Channel, ViewGroup
from shoal.collectives.outcome import Discarded
from shoal.data.batch import Batch
from shoal.data.datasets import DatasetSplit
from shoal.lanes.lane_sum import LaneSum
from shoal.lanes.reduction_tree import TreeSum
from shoal.net.errors import LinkError
from shoal.sharding.replica import ShardedReplica
from shoal.spec.view import View
from shoal.strategies.context import Metrics, StepContext
from shoal.strategies.sharded_commit import ShardedSync
from shoal.tasks.evaluation import merge_results
from shoal.tasks.user_errors import wrap_user_errors

LOCKSTEP_PHASE = "together"
"""The activity phase of a worker in a pass: one slow member slows down all members of its replica, and it does not show
from outside which one it is."""


class ShardedCompute:
    """Belongs to the training thread. `example` is a batch whose values do not matter."""

    def __init__(self, context: StepContext, group: ViewGroup, sync: ShardedSync, *, example: Batch) -> None:
        self._context = context
        self._group = group
        self._sync = sync
        self._example = example

    # ---- training ----

    def run_lanes(
        self, replica: ShardedReplica, lanes: Sequence[int], sums: TreeSum[LaneSum], must_halt: Callable[[], bool]
    ) -> bool:
        """Run this member's lanes one after the other. A member without a lane in a pass, or whose lane has no samples,
        still runs the model with weight 0: the other members of its replica need it in the collectives. LinkError if a
        member is lost. Returns whether this worker must halt."""
        context, step, clock = self._context, self._context.progress.step, time.perf_counter
        halt, total = must_halt(), context.sampler.batch_samples(step)
        mesh = replica.sharded_model.mesh
        counts_samples = mesh.shard_rank == 0 or not replica.sharded_model.shares_lane  # one counts a shared lane
        for index in range(self._sync.passes_per_step):
            t0 = clock()
            lane = lanes[index] if index < len(lanes) else None
            context.activity.begin("data", step)
            batch = None if lane is None else context.batches.get(step, lane)
            t1 = clock()
            context.stats.add_time("data_s", t1 - t0)
            context.activity.begin(LOCKSTEP_PHASE, step)
            if batch is not None and counts_samples:
                context.stats.add_samples(batch.size)
            sums.push_lane(index, self._forward_backward(replica, lane, batch, total))
            context.stats.add_time("compute_s", clock() - t1)
        return halt

    def _forward_backward(self, replica: ShardedReplica, lane: int | None, batch: Batch | None, total: int) -> LaneSum:
        step = self._context.progress.step
        number = self._context.sampler.lanes if lane is None else lane
        share = 0.0 if batch is None else batch.size / total
        with wrap_user_errors("SH401", f"step {step}, lane {number}"), self._sync.as_link_errors():
            return replica.forward_backward(step, number, batch or self._example, share=share)

    # ---- evaluation ----

    @torch.no_grad()
    def evaluate(
        self, replica: ShardedReplica, split: DatasetSplit, view: View, lanes: Sequence[int]
    ) -> Metrics | Discarded:
        """Evaluate a whole split, together with all members. LinkError if a member is lost."""
        evaluator, step = self._context.evaluator, self._context.progress.step
        self._context.activity.begin(LOCKSTEP_PHASE, step)
        mesh = replica.sharded_model.mesh
        mine = evaluator.chunks_of(split, lanes)
        row = [seat for seat, rank in view.places.items() if rank // mesh.replica_size == mesh.replica_rank]
        passes = max(len(evaluator.chunks_of(split, view.carries[seat])) for seat in row)
        has_output = (
            not replica.sharded_model.shares_lane or mesh.shard_rank == mesh.replica_size - 1
        )  # the last stage of a pipeline
        with self._sync.as_link_errors():
            found = evaluator.accumulate_in_lockstep(
                replica,
                split,
                mine,
                passes=passes,
                has_output=has_output,
                evaluate_batch=lambda batch, doing: self._evaluate_batch(replica, batch, doing),
                on_chunk=self._on_chunk,
            )
        if self._group.aborted():
            return Discarded("asked to stop")
        by_lane = {lane: one.state() for lane, one in found.items() if lane >= 0}
        results = self._group.gather(Channel[split.name.upper()].label(step), pack_state(by_lane))
        if isinstance(results, Discarded):
            return results
        metrics: Metrics = {}
        if found:
            metrics = merge_results(results, next(iter(found.values())))
        results = self._group.gather(Channel[f"{split.name.upper()}_RESULT"].label(step), pack_state(metrics))
        if isinstance(results, Discarded):
            return results
        return next(_checked_metrics(result) for content in results.values() if (result := unpack_state(content)))

    def _on_chunk(self) -> None:
        self._context.activity.begin(LOCKSTEP_PHASE, self._context.progress.step)
        if self._group.aborted():
            raise LinkError("asked to stop")

    def _evaluate_batch(self, replica: ShardedReplica, batch: Batch, doing: str) -> tuple[Any, Any]:
        """Loss and predictions. A pipeline runs the model once for each, unless the task computes both in one pass."""
        task, sharded_model = self._context.task, replica.sharded_model
        with wrap_user_errors("SH401", doing), self._sync.as_link_errors(), replica.autocast_context():
            if sharded_model.shares_lane and not task.evaluates_in_one_pass:
                return sharded_model.forward(task.loss, batch), sharded_model.forward(task.predict, batch)
            found = sharded_model.forward(task.evaluate, batch)
            return (None, None) if found is None else found


def _checked_metrics(found: Any) -> Metrics:
    """LinkError if a member sent something that is no metrics."""
    if not isinstance(found, dict) or not all(type(k) is str and type(v) is float for k, v in found.items()):
        raise LinkError("a member sent something that is no metrics")
    return found
