"""`sync: lanes` with an exchange that stays on the device: the sums never pass through host memory.

As with `sync: ddp`, all members meet before the exchange of a step, over the view's own connections. A dead member is
noticed there at once, and the exchange itself never waits for a worker that still computes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

import torch

from shoal.collectives.device_allreduce import DeviceAllReduce, PartialsHeader
from shoal.collectives.group import Channel, ViewGroup
from shoal.collectives.outcome import Discarded
from shoal.collectives.view_process_group import ViewProcessGroup
from shoal.lanes.flat_layout import FlatLayout
from shoal.lanes.lane_sum import LaneSum, mixed_counts_error
from shoal.lanes.reduction_tree import TreeSum
from shoal.net.errors import LinkError
from shoal.spec.view import View
from shoal.strategies.base import HeldWeights
from shoal.strategies.ordered_sync import Agreed, OrderedSync
from shoal.strategies.sync_defaults import OnTotal


class DeviceAllReduceSync(OrderedSync):
    """A single worker uses nothing of torch.distributed."""

    def __init__(self, lanes: int, group: ViewGroup, *, device: torch.device, on_total: OnTotal | None = None) -> None:
        super().__init__(lanes, group, on_total)
        self._process_group = ViewProcessGroup(group, backend="auto", device=device)
        self._allreduce: DeviceAllReduce | None = None

    def reconfigure(self, view: View, seat: int) -> Discarded | None:
        self._allreduce = None
        return self._process_group.enter(view, seat)

    def reduce(self, held: HeldWeights, label: int, sums: TreeSum[LaneSum], *, halt: bool) -> Agreed | Discarded:
        if self._group.broken:
            return Discarded(self._group.broken)
        if not self._process_group.exists:
            return Agreed(sums.total(), halt)
        exchange = self._allreduce or self._make_allreduce(held)
        mine = exchange.write(sums.partials, halt=halt)
        began = time.perf_counter()
        told = self._group.gather(Channel.STEP_HEADER.label(label), mine.pack())
        if isinstance(told, Discarded):
            self._process_group.leave()
            return told
        met = time.perf_counter()
        try:
            said = {seat: PartialsHeader.unpack(content) for seat, content in told.items()}
            halting, counted = any(one.halt for one in said.values()), _counted(said)
            if counted is None:
                return Agreed(None, halting, waited_s=met - began)
            self._process_group.run(partial(exchange.run, {seat: one.filled for seat, one in said.items()}))
        except LinkError as failure:
            return self._process_group.discard(failure)
        exchange_s = time.perf_counter() - met
        return Agreed(exchange.total(counted=counted), halting, exchange.bytes_sent, met - began, exchange_s)

    def _make_allreduce(self, held: HeldWeights) -> DeviceAllReduce:
        """Called at the first step of a view. A process group that this worker has left may still write into it."""
        view = self._group.view
        assert view is not None
        self._allreduce = DeviceAllReduce(
            FlatLayout(held.sum_template()), view.carries, self._lanes, seat=self._group.seat, device=held.device
        )
        return self._allreduce

    def close(self) -> None:
        self._allreduce = None
        self._process_group.close()


def _counted(headers: Mapping[int, PartialsHeader]) -> bool | None:
    """Whether losses have a count; None if no lane has samples."""
    if len({one.digest for one in headers.values()}) > 1:
        raise LinkError("a member has a model of other shapes")
    counted = {one.counted for one in headers.values() if one.filled}
    if len(counted) > 1:
        raise mixed_counts_error()
    return counted.pop() if counted else None
