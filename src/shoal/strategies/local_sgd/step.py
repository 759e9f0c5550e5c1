"""From one agreement to the next, where lanes train by themselves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from shoal.lanes.lane_sum import LaneSum
from shoal.lanes.reduction_tree import TreeSum
from shoal.net.errors import LinkError
from shoal.strategies.local_sgd.fragments import FragmentChannel, PendingFragment
from shoal.strategies.local_sgd.replica import LocalReplica
from shoal.strategies.local_sgd.schedule import Segment
from shoal.strategies.replicated import OrderedAllReduceSync

if TYPE_CHECKING:
    from shoal.train.loop import Loop


class LocalSgdStep:
    """Belongs to the training thread. Lanes that this worker carries take turns, from leg to leg."""

    def __init__(self, loop: Loop, replica: LocalReplica, sync: OrderedAllReduceSync) -> None:
        self._loop = loop
        self._replica = replica
        self._sync = sync
        self._pending: PendingFragment | None = None

    def compute(self, sums: TreeSum[LaneSum]) -> None:
        """All lanes, up to the next agreement. LinkError if it cannot be reached."""
        loop, train_schedule = self._loop, self._loop.train_schedule
        start, stop = loop.step, train_schedule.next_commit(loop.step)
        channels, every = list[FragmentChannel](), train_schedule.sync_schedule.steps_per_round
        if stop - start > every:
            channels = self._sync.fragment_channels(self._replica, min(train_schedule.fragments, every))
        total = 0
        try:
            for segment in train_schedule.sync_schedule.segments(start, stop, fragments=max(len(channels), 1)):
                for lane in loop.lanes:
                    self._train_lane(lane, segment)
                total += sum(map(loop.sampler.batch_samples, range(segment.start, segment.stop)))
                if segment.arriving_fragment is not None:
                    self._receive_fragment(segment, channels[segment.arriving_fragment])
                if segment.leaving_fragment is not None:
                    self._send_fragment(segment, channels[segment.leaving_fragment], total)
        except BaseException:
            self._abandon_pending()
            raise
        for lane in loop.lanes:
            sums.push_lane(lane, self._replica.pseudo_gradient(lane, total))

    def _train_lane(self, lane: int, segment: Segment) -> None:
        loop, clock = self._loop, time.perf_counter
        for step in range(segment.start, segment.stop):
            self._check_not_aborted()
            t0 = clock()
            loop.activity.begin("data", step)
            batch = loop.batches.get(step, lane)
            loop.activity.begin("compute", step)
            t1 = clock()
            loop.stats.add_time("data_s", t1 - t0)
            if batch is None:
                self._replica.skip_inner_step(step, lane)
                continue
            loss = loop.inner_step(step, lane, batch)
            loop.stats.add_samples(batch.size)
            took = clock() - t1
            loop.stats.add_time("compute_s", took)
            loop.activity.record_lane_time(took)
            if lane == loop.lanes[-1]:  # a row has as much of every lane
                whole = len(loop.lanes) == 1 or step + 1 == segment.stop
                loop.stats.record_inner_step(step + 1, loss=loss, lr=self._replica.lr, emit=whole)

    def _check_not_aborted(self) -> None:
        """Is there still somebody to agree with?"""
        if self._pending:
            self._pending.raise_if_failed()
        if self._sync.aborted():
            raise LinkError("aborted")

    # ---- fragments ----

    def _send_fragment(self, segment: Segment, channel: FragmentChannel, total: int) -> None:
        began = time.perf_counter()
        sums = channel.allreduce.begin_step()
        for lane in self._loop.lanes:
            sums.push_lane(lane, self._replica.send_fragment(lane, channel.param_indices, total))
        self._pending = PendingFragment(channel.allreduce, segment.stop, sums)
        self._loop.stats.add_time("exchange_s", time.perf_counter() - began)

    def _receive_fragment(self, segment: Segment, channel: FragmentChannel) -> None:
        loop, began = self._loop, time.perf_counter()
        assert self._pending is not None
        loop.activity.begin("exchange", segment.stop)
        agreed = self._pending.wait()
        self._pending = None
        waited = time.perf_counter() - began
        loop.stats.add_time("waiting_s", waited)
        loop.stats.add_bytes(agreed.bytes_sent, channel.allreduce.plain_bytes)
        if agreed.total is not None:
            loop.peers.state_publisher.publish_fragment(segment.stop, channel.param_indices, agreed.total.grads)
            self._replica.apply_fragment(channel.param_indices, agreed.total.grads)
        loop.stats.add_time("exchange_s", time.perf_counter() - began - waited)

    def _abandon_pending(self) -> None:
        """A thread may still be at work with memory that the next view wants."""
        if self._pending:
            self._sync.abort_view()
            self._pending.join()
            self._pending = None
