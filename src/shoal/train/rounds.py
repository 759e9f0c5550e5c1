"""From one agreement to the next, where lanes train by themselves."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from shoal.parallel.lane_sum import LaneSum
from shoal.parallel.local.pace import Leg
from shoal.parallel.local.replica import LocalReplica
from shoal.parallel.local.streams import Underway, Way
from shoal.parallel.sync.lanes import LanesSync
from shoal.parallel.tree import TreeSum
from shoal.wire.handshake import LinkError

if TYPE_CHECKING:
    from shoal.train.loop import Loop


class Rounds:
    """Belongs to the training thread. Lanes that this worker carries take turns, from leg to leg."""

    def __init__(self, loop: Loop, replica: LocalReplica, sync: LanesSync) -> None:
        self._loop = loop
        self._replica = replica
        self._sync = sync
        self._underway: Underway | None = None

    def compute(self, sums: TreeSum[LaneSum]) -> None:
        """All lanes, up to the next agreement. LinkError if it cannot be reached."""
        loop, course = self._loop, self._loop.course
        start, stop = loop.step, course.after(loop.step)
        ways, every = list[Way](), course.pace.every
        if stop - start > every:
            ways = self._sync.ways(self._replica, min(course.fragments, every))
        total = 0
        try:
            for leg in course.pace.legs(start, stop, fragments=max(len(ways), 1)):
                for lane in loop.lanes:
                    self._train(lane, leg)
                total += sum(map(loop.dealer.total, range(leg.start, leg.stop)))
                if leg.arrives is not None:
                    self._arrive(leg, ways[leg.arrives])
                if leg.leaves is not None:
                    self._leave(leg, ways[leg.leaves], total)
        except BaseException:
            self._give_up()
            raise
        for lane in loop.lanes:
            sums.lane(lane, self._replica.change(lane, total))

    def _train(self, lane: int, leg: Leg) -> None:
        loop, clock = self._loop, time.perf_counter
        for step in range(leg.start, leg.stop):
            self._check()
            t0 = clock()
            loop.pulse.enter("data", step)
            batch = loop.feed.get(step, lane)
            loop.pulse.enter("compute", step)
            t1 = clock()
            loop.progress.spent("data_s", t1 - t0)
            if batch is None:
                self._replica.skip(step, lane)
                continue
            loss = loop.inner(step, lane, batch)
            loop.progress.computed(batch.size)
            took = clock() - t1
            loop.progress.spent("compute_s", took)
            loop.pulse.lane_took(took)
            if lane == loop.lanes[-1]:  # a row has as much of every lane
                whole = len(loop.lanes) == 1 or step + 1 == leg.stop
                loop.progress.inner(step + 1, loss=loss, lr=self._replica.lr, row=whole)

    def _check(self) -> None:
        """Is there still somebody to agree with?"""
        if self._underway:
            self._underway.check()
        if self._sync.aborted():
            raise LinkError("aborted")

    # ---- fragments ----

    def _leave(self, leg: Leg, way: Way, total: int) -> None:
        began = time.perf_counter()
        sums = way.stream.begin()
        for lane in self._loop.lanes:
            sums.lane(lane, self._replica.leave(lane, way.which, total))
        self._underway = Underway(way.stream, leg.stop, sums)
        self._loop.progress.spent("exchange_s", time.perf_counter() - began)

    def _arrive(self, leg: Leg, way: Way) -> None:
        loop, began = self._loop, time.perf_counter()
        assert self._underway is not None
        loop.pulse.enter("exchange", leg.stop)
        agreed = self._underway.wait()
        self._underway = None
        waited = time.perf_counter() - began
        loop.progress.spent("waiting_s", waited)
        loop.progress.sent(agreed.bytes_sent, way.stream.plain_bytes)
        if agreed.total is not None:
            loop.peers.feeder.fragment(leg.stop, way.which, agreed.total.grads)
            self._replica.arrive(way.which, agreed.total.grads)
        loop.progress.spent("exchange_s", time.perf_counter() - began - waited)

    def _give_up(self) -> None:
        """A thread may still be at work with memory that the next view wants."""
        if self._underway:
            self._sync.break_off()
            self._underway.end()
            self._underway = None
