"""Local SGD: lanes train by themselves and sync every few steps, `sync: local`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from shoal.collectives.group import ViewGroup
from shoal.collectives.outcome import Committed, Discarded
from shoal.errors import error
from shoal.lanes.lane_sum import LaneSum
from shoal.lanes.reduction_tree import TreeSum
from shoal.net.errors import LinkError
from shoal.spec.view import View
from shoal.strategies.base import GradientSync
from shoal.strategies.context import StepContext
from shoal.strategies.local_sgd.fragments import FragmentChannel, FragmentChannels, PendingFragment
from shoal.strategies.local_sgd.replica import LocalReplica
from shoal.strategies.local_sgd.schedule import Segment, SyncSchedule
from shoal.strategies.replicated import ReplicatedStrategy
from shoal.tasks.user_errors import wrap_user_errors


class LocalSgdStrategy(ReplicatedStrategy):
    """See Strategy. A commit is a sync: what lanes do before it counts only then. The lanes of this worker take turns,
    segment by segment. Fragments of the parameters are exchanged while lanes compute."""

    def __init__(
        self,
        context: StepContext,
        local: LocalReplica,
        *,
        group: ViewGroup,
        sync: GradientSync,
        schedule: SyncSchedule,
        fragments: int,
        channels: FragmentChannels,
    ) -> None:
        super().__init__(context, local.replica, group=group, sync=sync, held=local)
        self._local = local
        self._schedule = schedule
        self._fragments = fragments
        self._channels = channels
        self._pending: PendingFragment | None = None
        self._seat = -1

    def enter(self, view: View, seat: int) -> Discarded | None:
        self._seat = seat
        self._channels.close()
        return super().enter(view, seat)

    def close(self) -> None:
        self._channels.close()
        super().close()

    def _next_step(self, step: int) -> int:
        return self._local.next_sync(step)

    # ---- following ----

    def _apply_entry(self, entry: Mapping[str, Any]) -> None:
        if entry["kind"] != "fragment":
            super()._apply_entry(entry)
            return
        committed, step = self._progress.step, entry["step"]
        if not committed < step < self._next_step(committed):
            raise LinkError(f"a fragment of step {step} after {committed}")
        self._local.apply_fragment(entry["which"], [change.to(self._local.device) for change in entry["changes"]])

    def _drop_uncommitted(self) -> None:
        """Undo fragments since the last commit: they count only with the next commit."""
        self._local.undo_step()

    # ---- from one sync to the next ----

    def run_step(self, must_halt: Callable[[], bool]) -> Committed | Discarded:
        outcome = super().run_step(must_halt)
        if isinstance(outcome, Discarded):
            self._context.peers.state_publisher.drop_subscribers()  # published fragments do not count
        return outcome

    def _compute(self, sums: TreeSum[LaneSum], must_halt: Callable[[], bool]) -> bool:
        """Train all lanes up to the next sync. LinkError if it cannot be reached."""
        start, every, channels = self._progress.step, self._schedule.steps_per_round, list[FragmentChannel]()
        stop = self._next_step(start)
        if stop - start > every:
            channels = self._channels.open(min(self._fragments, every))
        total = 0
        try:
            for segment in self._schedule.segments(start, stop, fragments=max(len(channels), 1)):
                for lane in self._lanes:
                    self._train_lane(lane, segment)
                total += sum(map(self._context.sampler.batch_samples, range(segment.start, segment.stop)))
                if segment.arriving_fragment is not None:
                    self._receive_fragment(segment, channels[segment.arriving_fragment])
                if segment.leaving_fragment is not None:
                    self._send_fragment(segment, channels[segment.leaving_fragment], total)
        except BaseException:
            self._abandon_pending()
            raise
        for lane in self._lanes:
            sums.push_lane(lane, self._local.pseudo_gradient(lane, total))
        return must_halt()

    def _train_lane(self, lane: int, segment: Segment) -> None:
        activity, stats, clock = self._context.activity, self._context.stats, time.perf_counter
        for step in range(segment.start, segment.stop):
            self._check_not_aborted()
            t0 = clock()
            activity.begin("data", step)
            batch = self._context.batches.get(step, lane)
            activity.begin("compute", step)
            t1 = clock()
            stats.add_time("data_s", t1 - t0)
            if batch is None:
                self._local.skip_inner_step(step, lane)
                continue
            loss = self._inner_step(step, lane, batch)
            stats.add_samples(batch.size)
            took = clock() - t1
            stats.add_time("compute_s", took)
            activity.record_lane_time(took)
            if lane == self._lanes[-1]:  # a row covers all lanes equally
                whole = len(self._lanes) == 1 or step + 1 == segment.stop
                stats.record_inner_step(step + 1, loss=loss, lr=self.lr, emit=whole)

    def _inner_step(self, step: int, lane: int, batch: Any) -> float:
        """Run one inner step of a lane. Returns its loss."""
        with wrap_user_errors("SH401", f"step {step}, lane {lane}"):
            loss = float(self._local.inner_step(step, lane, self._to_device(batch), size=batch.size))
        if not math.isfinite(loss):
            raise error("SH403", f"the loss of lane {lane} is {loss} at step {step + 1}", where=f"worker-{self._seat}")
        return loss

    def _check_not_aborted(self) -> None:
        """LinkError if the view is aborted or the fragment in flight has failed."""
        if self._pending:
            self._pending.raise_if_failed()
        if self._group.aborted():
            raise LinkError("aborted")

    # ---- fragments ----

    def _send_fragment(self, segment: Segment, channel: FragmentChannel, total: int) -> None:
        began = time.perf_counter()
        sums = channel.allreduce.begin_step()
        for lane in self._lanes:
            sums.push_lane(lane, self._local.send_fragment(lane, channel.param_indices, total))
        self._pending = PendingFragment(channel.allreduce, segment.stop, sums)
        self._context.stats.add_time("exchange_s", time.perf_counter() - began)

    def _receive_fragment(self, segment: Segment, channel: FragmentChannel) -> None:
        context, began = self._context, time.perf_counter()
        assert self._pending is not None
        context.activity.begin("exchange", segment.stop)
        agreed = self._pending.wait()
        self._pending = None
        waited = time.perf_counter() - began
        context.stats.add_time("waiting_s", waited)
        context.stats.add_bytes(agreed.bytes_sent, channel.allreduce.plain_bytes)
        if agreed.total is not None:
            context.peers.state_publisher.publish_fragment(segment.stop, channel.param_indices, agreed.total.grads)
            self._local.apply_fragment(channel.param_indices, agreed.total.grads)
        context.stats.add_time("exchange_s", time.perf_counter() - began - waited)

    def _abandon_pending(self) -> None:
        """Abort the view and wait for the fragment in flight: its thread may use memory that the next view needs."""
        if self._pending:
            self._group.abort_present_view()
            self._pending.join()
            self._pending = None
