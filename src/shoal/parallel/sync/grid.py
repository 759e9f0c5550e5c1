"""Members that hold a model together, in rows, and agree across rows: for `shard`.

Within a row, torch moves activations, parameters and gradients as the model runs; across rows, members of the same
part add up what their rows found. A step counts in two phases: when a member has all that its update needs, it votes;
when it has seen every vote, it updates. So if one has updated, all others can, even where a death kept votes from
them: nobody ever holds a part of one step beside a part of another.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor, distributed
from torch._C._distributed_c10d import TCPStore

from shoal.errors import ShoalError
from shoal.parallel.links.endpoint import Endpoint
from shoal.parallel.replica import LaneSum, Replica, add
from shoal.parallel.shard.grid import Grid
from shoal.parallel.shard.mirror import Mirror
from shoal.parallel.shard.replica import ShardedReplica
from shoal.parallel.shard.wires import Wires
from shoal.parallel.sync.base import Committed, Discarded, Together
from shoal.parallel.sync.circle import MEETING_TIME
from shoal.parallel.sync.meeting import Meeting
from shoal.parallel.tree import TreeSum
from shoal.spec.view import View
from shoal.wire.handshake import LinkError

_MEET, _VOTE = 1 << 60, 1 << 61  # labels that nobody else uses
_PORT = struct.Struct("<H")
_SAID = struct.Struct("<??")
LOOK_UP_S = 0.05


class Pending(NamedTuple):
    """A step that this member has voted for in a view, without having seen all votes."""

    view: int
    step: int
    total: LaneSum


class GridSync(Together):
    """See Sync. `wants_save(step)` says before a commit whether that step should be saved; `saves`, after it, whether
    any member said so. `counted` is the view in which the last step counted, wherever this member has it from."""

    exact = False
    taps = False

    def __init__(self, ways: int, *, endpoint: Endpoint | None = None, token: str = "") -> None:
        super().__init__(1)
        self.grid: Grid | None = None
        self.pending: Pending | None = None
        self.counted = 0
        self.turns = 1
        self.saves = False
        self.mirror: Mirror | None = None
        self.wants_save: Callable[[int], bool] = lambda step: False
        self._ways = ways
        self._view = 0
        self._meeting = Meeting(endpoint, token)
        self._wires: Wires | None = None
        self._sent_bytes = 0

    # ---- views ----

    def reconfigure(self, view: View, seat: int) -> str:
        self._leave()
        if why := self._meeting.enter(view, seat):
            return why
        first, host = min(view.places, key=view.places.__getitem__), view.addresses[seat].host
        listener = _listener(host) if seat == first else None
        try:
            port = _PORT.pack(listener.getsockname()[1] if listener else 0)
            told = self._meeting.gather(_MEET + view.number, port)
            if isinstance(told, Discarded):
                return told.why
            (port_there,) = _PORT.unpack(told[first])
            with self.talking(), self._watching():
                store = _store(view.addresses[first].host, port_there, listener)
                place, size = view.places[seat], len(view.places)
                self.grid = Grid(store, rank=place, size=size, ways=self._ways, number=view.number)
                self.grid.given_up = self._meeting.aborted
            self._settle()
        except LinkError as failure:
            return self.discard(failure).why
        finally:
            if listener:
                listener.close()
        self.turns, self._view = _turns(view, self._ways, self.grid.row), view.number
        return ""

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Connections come into being one by one: an abort must find those, too, that are made after it."""
        wires, done = Wires(), threading.Event()
        self._wires = wires

        def watch() -> None:
            while not done.wait(LOOK_UP_S):
                if self._meeting.aborted():
                    wires.cut()

        watcher = threading.Thread(target=watch, name="shoal-grid", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()

    def _settle(self) -> None:
        assert self._wires is not None
        self._wires.settle()
        self._sent_bytes = self._wires.sent_bytes()
        if self._meeting.broken:
            raise LinkError(self._meeting.broken)

    @contextlib.contextmanager
    def talking(self) -> Iterator[None]:
        """Around all that may wait for other members. If one is lost that is a LinkError, and the rest learn of it."""
        try:
            yield
        except ShoalError:
            raise
        except LinkError:
            self._cut()
            raise
        except RuntimeError as failure:
            text = str(failure)
            lost = isinstance(failure, distributed.DistError) or "gloo" in text or self._meeting.broken
            if not lost:
                raise
            self._cut()
            raise LinkError(self._meeting.broken or text.splitlines()[0]) from failure

    def discard(self, failure: LinkError) -> Discarded:
        """It failed, and nothing more comes of this view."""
        self._cut()
        return Discarded(self._meeting.broken) if self._meeting.broken else self._meeting.discard(failure)

    # ---- steps ----

    def sums(self) -> TreeSum[LaneSum]:
        """Of this row's turns."""
        return TreeSum(self.turns, add)

    def ahead(self, replica: Replica, step: int, sums: TreeSum[LaneSum], lane: int, *, halt: bool) -> None:
        return None

    def commit(
        self, replica: Replica, step: int, sums: TreeSum[LaneSum], *, halt: bool = False
    ) -> Committed | Discarded:
        if self._meeting.broken:
            return Discarded(self._meeting.broken)
        assert isinstance(replica, ShardedReplica)
        began = time.perf_counter()
        self.pending = None
        total = sums.total()
        assert total is not None
        try:
            with self.talking():
                replica.agree(total)
                replica.scale(total)
                if self.mirror:
                    self.mirror.trade(total)
        except LinkError as failure:
            return self.discard(failure)
        agreed = time.perf_counter()
        self.pending = Pending(self._view, step, total)
        told = self._meeting.gather(_VOTE + step, _SAID.pack(halt, self.wants_save(step + 1)))
        if isinstance(told, Discarded):
            self._cut()
            return told
        try:
            said = [_SAID.unpack(content) for content in told.values()]
        except struct.error:
            return self.discard(LinkError("a member says noise"))
        met = time.perf_counter()
        loss = self.advance(replica)
        self.saves = any(saves for _, saves in said)
        halting = any(halts for halts, _ in said)
        return Committed(loss, self._sent(), halting, waited_s=met - agreed, exchange_s=agreed - began)

    def advance(self, replica: ShardedReplica) -> Tensor:
        """The step that this member has voted for counts. Returns its loss."""
        assert self.pending is not None
        (self.counted, step, total), self.pending = self.pending, None
        if self.mirror:
            self.mirror.advance(replica.optimizer)
        return replica.advance(step, total)

    def _sent(self) -> int:
        before, self._sent_bytes = self._sent_bytes, self._wires.sent_bytes() if self._wires else 0
        return max(self._sent_bytes - before, 0)

    def gather(self, label: int, content: bytes) -> dict[int, bytes] | Discarded:
        return self._meeting.gather(label, content)

    def moved_bytes(self) -> int:
        wires = self._wires
        return self._meeting.moved_bytes + (wires.sent_bytes() if wires else 0)

    # ---- ends ----

    def abort(self, view: int) -> None:
        self._meeting.abort(view)
        if self._meeting.aborted():
            self._cut()

    def aborted(self) -> bool:
        return self._meeting.aborted()

    def _cut(self) -> None:
        wires = self._wires
        if wires:
            wires.cut()

    def _leave(self) -> None:
        self._cut()
        self._wires = None
        if self.grid or distributed.is_initialized():
            if self.grid:
                self.grid.leave()
            self.grid = None
            with contextlib.suppress(RuntimeError):
                distributed.destroy_process_group()
        self._meeting.leave()

    def close(self) -> None:
        self._leave()


def _turns(view: View, ways: int, row: int) -> int:
    """How often the members of a row run the model in a step."""
    return max(len(view.carries[seat]) for seat, rank in view.places.items() if rank // ways == row)


def _listener(host: str) -> socket.socket:
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _store(host: str, port: int, listener: socket.socket | None) -> TCPStore:
    """Where members find each other; the first of them keeps it."""
    if listener is None:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=MEETING_TIME, multi_tenant=False)
    return TCPStore(
        host,
        port,
        is_master=True,
        master_listen_fd=os.dup(listener.fileno()),  # the store closes it
        wait_for_workers=False,
        timeout=MEETING_TIME,
        multi_tenant=False,
    )
