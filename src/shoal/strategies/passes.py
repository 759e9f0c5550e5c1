"""Steps in several passes with `sync: lanes`: several optimizers in turn, or an optimizer that calls a closure.

Every pass is an ordered all-reduce of its own. The step counts when its last pass is applied; a member that is lost
before takes the whole step back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from shoal.collectives.group import ViewGroup
from shoal.collectives.outcome import Committed, Discarded
from shoal.errors import error
from shoal.lanes.lane_sum import LaneSum
from shoal.lanes.passes import MAX_PASSES, ComputeLane, MultiPassReplica
from shoal.net.errors import LinkError
from shoal.strategies.context import StepContext
from shoal.strategies.ordered_sync import OrderedSync
from shoal.strategies.replicated import ReplicatedStrategy, exchange_carry
from shoal.strategies.step import attempt_step
from shoal.tasks.user_errors import wrap_user_errors


class StepPasses:
    """See Passes. `batches` are those of this worker's lanes; None for a lane without samples."""

    def __init__(
        self,
        step: int,
        batches: Mapping[int, Any],
        *,
        replica: MultiPassReplica,
        sync: OrderedSync,
        context: StepContext,
        keeps_undo: bool,
        halt: bool,
    ) -> None:
        self.keeps_undo = keeps_undo
        self._step, self._batches = step, batches
        self._samples = context.sampler.batch_samples(step)
        self._replica, self._sync, self._context = replica, sync, context
        self.halt = halt
        self.bytes_sent = self._number = 0
        self.waited_s = self.exchange_s = 0.0

    def total(self, compute: ComputeLane) -> LaneSum | None:
        if self._number == MAX_PASSES:
            raise error("SH865", f"step {self._step} asks for more than {MAX_PASSES} passes", where="optimizer")
        sums = self._sync.begin_step()
        self._context.activity.begin("compute", self._step)
        for lane, batch in self._batches.items():
            sums.push_lane(lane, None if batch is None else self._compute(compute, lane, batch))
        self._context.activity.begin("exchange", self._step)
        if self._replica.carry and not self._number:
            exchange_carry(self._replica.carry, self._sync.group, self._step)
        label = self._step * MAX_PASSES + self._number
        self._number += 1
        agreed = self._sync.reduce(self._replica, label, sums, halt=self.halt)
        if isinstance(agreed, Discarded):
            raise LinkError(agreed.why)
        self.halt = self.halt or agreed.halt
        self.bytes_sent += agreed.bytes_sent
        self.waited_s += agreed.waited_s
        self.exchange_s += agreed.exchange_s
        if self._replica.pass_observer:
            self._replica.pass_observer.pass_summed(agreed.total)
        return agreed.total

    def _compute(self, compute: ComputeLane, lane: int, batch: Any) -> LaneSum | None:
        with wrap_user_errors("SH401", f"step {self._step}, lane {lane}"):
            result = compute(lane, batch, batch.size / self._samples)
        if self._replica.pass_observer:
            self._replica.pass_observer.lane_passed(lane, batch, result)
        return result


class MultiPassStrategy(ReplicatedStrategy):
    """See Strategy."""

    def __init__(self, context: StepContext, replica: MultiPassReplica, *, group: ViewGroup, sync: OrderedSync) -> None:
        super().__init__(context, replica, group=group, sync=sync)
        self._multi_pass_replica = replica
        self._ordered_sync = sync

    def _apply_entry(self, entry: Mapping[str, Any]) -> None:
        """Only totals of single updates are streamed: a new worker fetches the whole state when it enters."""
        raise LinkError("a job with several passes in a step cannot be followed")

    def run_step(self, must_halt: Callable[[], bool]) -> Committed | Discarded:
        step, context = self._progress.step, self._context
        publisher = context.peers.state_publisher
        if publisher.active:
            publisher.start_subscribers(self._peer_state)
        batches: dict[int, Any] = {}

        def load() -> bool:
            began = time.perf_counter()
            context.activity.begin("data", step)
            for lane in self._lanes:
                batch = context.batches.get(step, lane)
                batches[lane] = None if batch is None else self._to_device(batch)
                context.stats.add_samples(0 if batch is None else batch.size)
            context.stats.add_time("data_s", time.perf_counter() - began)
            return must_halt()

        outcome = attempt_step(
            context, self._held, compute=load, commit=lambda halt: self._take_step(batches, halt), alone=self._alone
        )
        if isinstance(outcome, Committed):
            self._progress.record_commit(outcome, step=step + 1, lr=self.lr)
        return outcome

    def _take_step(self, batches: Mapping[int, Any], halt: bool) -> Committed | Discarded:
        step, began = self._progress.step, time.perf_counter()
        passes = StepPasses(
            step,
            batches,
            replica=self._multi_pass_replica,
            sync=self._ordered_sync,
            context=self._context,
            keeps_undo=not self._alone,
            halt=halt,
        )
        try:
            loss = self._multi_pass_replica.take_step(step, passes)
        except LinkError as failure:
            return Discarded(str(failure))
        seconds = time.perf_counter() - began - passes.waited_s - passes.exchange_s
        self._context.activity.record_lane_time(seconds / len(self._lanes))
        return Committed(loss, passes.bytes_sent, passes.halt, passes.waited_s, passes.exchange_s)
