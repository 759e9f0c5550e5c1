"""Fragments on their way while lanes compute: each has an exchange of its own, and one is under way at a time."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from shoal.parallel.cutting import Form
from shoal.parallel.encoded import EncodedExchange, Round, arena_bytes
from shoal.parallel.exchange import Agreed, Exchange
from shoal.parallel.exchange_plan import Plan
from shoal.parallel.flat import Layout
from shoal.parallel.lane_sum import LaneSum, add
from shoal.parallel.links.memory import Arena, Memory
from shoal.parallel.links.mesh import Mesh
from shoal.parallel.memories import Part
from shoal.parallel.tree import TreeSum
from shoal.wire.handshake import LinkError

Carries = Mapping[int, Sequence[int]]


class Stream(Protocol):
    """The way of one fragment in one view. Without a codec, `plain_bytes` would be sent each time; None where there is
    none."""

    plain_bytes: int | None

    def begin(self) -> TreeSum[LaneSum]:
        """What takes this worker's lanes."""

    def run(self, step: int, sums: TreeSum[LaneSum]) -> Agreed:
        """All lanes are there: trade them for the sum of everybody's. In a thread of its own."""

    def close(self) -> None:
        """Nobody runs it any more."""


class Way(NamedTuple):
    """Of a fragment: the numbers of its parameters, and how they travel."""

    which: list[int]
    stream: Stream


class PlainStream:
    plain_bytes: int | None = None

    def __init__(
        self, layout: Layout, carries: Carries, lanes: int, *, mesh: Mesh | None, device: torch.device
    ) -> None:
        self._mesh = mesh
        self._lanes = lanes
        self._plan = Plan.of(carries, lanes, layout)
        self._device = device
        self._exchange: Exchange | None = None
        self._arena: Arena | None = None

    def begin(self) -> TreeSum[LaneSum]:
        return TreeSum(self._lanes, add)

    def run(self, step: int, sums: TreeSum[LaneSum]) -> Agreed:
        if self._mesh is None:
            return Agreed(sums.total(), halt=False, bytes_sent=0, waited_s=0.0)
        if self._exchange is None:
            self._arena = arena = Arena(self._plan.arena_bytes(self._mesh.seat))
            total = Memory.private(self._plan.layout.size_bytes)
            self._exchange = Exchange(self._mesh, self._plan, arena=arena, total=total, device=self._device, step=step)
        return self._exchange.run(step, sums.partials, halt=False)

    def close(self) -> None:
        self._exchange = None
        if self._arena:
            self._arena.close()


class EncodedStream:
    def __init__(
        self,
        form: Form,
        carries: Carries,
        seat: int,
        *,
        mesh: Mesh | None,
        memories: Part | None,
        device: torch.device,
    ) -> None:
        stretch, total = Memory.private(form.layout.size_bytes), Memory.private(form.layout.size_bytes)
        self._memories = memories
        lanes, far = sum(map(len, carries.values())), [link.seat for link in mesh.far] if mesh else []
        self.plain_bytes: int | None = Plan.of(carries, lanes, form.layout).sent_bytes(seat, far) if far else 0
        self._arena = Arena(arena_bytes(form, len(carries[seat])))
        self._exchange: EncodedExchange | None = EncodedExchange(
            form,
            carries,
            seat,
            mesh=mesh,
            arena=self._arena,
            stretch=stretch,
            total=total,
            memories=memories,
            device=device,
        )

    def begin(self) -> TreeSum[LaneSum]:
        assert self._exchange
        return self._exchange.begin()

    def run(self, step: int, sums: TreeSum[LaneSum]) -> Agreed:
        assert isinstance(sums, Round)
        if self._memories:
            self._memories.turn()
        return sums.exchange.run(sums, step, halt=False)

    def close(self) -> None:
        self._exchange = None
        self._arena.close()


class Underway:
    """A fragment between leaving and arriving. Whoever waits for it gets LinkError if it does not arrive."""

    def __init__(self, stream: Stream, step: int, sums: TreeSum[LaneSum]) -> None:
        self._found: Agreed | BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(stream, step, sums), daemon=True, name="fragment")
        self._thread.start()

    def _run(self, stream: Stream, step: int, sums: TreeSum[LaneSum]) -> None:
        try:
            self._found = stream.run(step, sums)
        except BaseException as failure:
            self._found = failure

    def check(self) -> None:
        """LinkError if it is known already that nothing will come of it."""
        if isinstance(self._found, LinkError):
            raise self._found

    def end(self) -> None:
        """However it ends."""
        self._thread.join()

    def wait(self) -> Agreed:
        self._thread.join()
        if isinstance(self._found, BaseException):
            raise self._found
        assert self._found is not None
        return self._found
