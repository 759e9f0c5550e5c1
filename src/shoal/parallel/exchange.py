"""The ordered exchange: workers that carry different lanes end with the same sum over all of them, to the bit.

Everybody lays down what it has of the tree, and whoever adds up a part of the stretch takes that part from all of them
in the order of the tree. On one host that means reading each other's arenas; between hosts the part is sent, and the
gradients of a worker's last lane go ahead while its backward still runs.

**One phase** (two members, or little to add): everybody adds up everything. There are two banks of partials, used in
turn. A bank is written again two steps later, and by then every peer has rung for the step in between, which it does
after it has read.

**Two phases**: everybody adds up its own share of the stretch and then collects the other shares. One bank is enough:
partials are written again when all peers have rung the second time, after reading them; shares are written again when
all have rung for the next step, after collecting them.

Arenas outlive views. A worker that stood still in an old view, and reads on when others are in a newer one, would
find their new numbers. So each bank has a stamp that changes before the bank does, and readers look at it afterwards.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.parallel.adding import Addition, term_of
from shoal.parallel.ahead import Ahead
from shoal.parallel.flat import ALIGN, Layout, shares, write
from shoal.parallel.links import frames
from shoal.parallel.links.frames import Frame
from shoal.parallel.links.link import Link, PeerError
from shoal.parallel.links.memory import Arena, Memory, look_into
from shoal.parallel.links.mesh import Mesh
from shoal.parallel.replica import LaneSum
from shoal.parallel.tree import Node, nodes_of
from shoal.wire.handshake import LinkError

LITTLE_BYTES = 1 << 20  # members times stretch: measured, where the second phase begins to pay
_STAMP = struct.Struct("<QQ")
_MOST_ADDITIONS = 8


@dataclass(frozen=True)
class Agreed:
    """What all members know after the exchange of a step. `total` is valid until the next; None if no lane had
    samples."""

    total: LaneSum | None
    halt: bool
    bytes_sent: int
    waited_s: float


@dataclass(frozen=True)
class Plan:
    """Who adds up what, and where it lies in each member's arena: stamps, banks of partials, the share it adds up.

    All members make the same plan from the view and the layout.
    """

    layout: Layout
    lanes: int
    nodes: Mapping[int, Sequence[Node]]
    shares: Mapping[int, tuple[int, int]]
    phases: int

    @classmethod
    def of(cls, carries: Mapping[int, Sequence[int]], lanes: int, layout: Layout) -> Plan:
        members = sorted(carries)
        nodes = {seat: nodes_of(carries[seat], lanes) for seat in members}
        if max(map(len, nodes.values())) > frames.MOST_NODES:
            raise ValueError(f"a member carries lanes in more than {frames.MOST_NODES} separate blocks")
        size = layout.size_bytes
        if len(members) == 2 or len(members) * size < LITTLE_BYTES:
            return cls(layout, lanes, nodes, dict.fromkeys(members, (0, size)), phases=1)
        return cls(layout, lanes, nodes, shares(size, members), phases=2)

    @property
    def banks(self) -> int:
        return 2 if self.phases == 1 else 1

    def partial(self, seat: int, bank: int, index: int) -> int:
        return ALIGN + (bank * len(self.nodes[seat]) + index) * self.layout.size_bytes

    def sums(self, seat: int) -> int:
        return self.partial(seat, self.banks, 0)

    def arena_bytes(self, seat: int) -> int:
        start, stop = self.shares[seat]
        return self.sums(seat) + (stop - start if self.phases == 2 else 0)


@dataclass
class Round:
    """The exchange of one step, under way. Of the partials laid down in `bank`, all but the last are complete; of
    that one the first `ready` bytes are, and `posted` says which of them each far peer was sent."""

    mine: Frame
    bank: int
    heard: dict[int, Frame]
    sent_before: int
    ready: int
    posted: dict[int, int]
    ahead: Ahead | None = None
    failure: LinkError | None = None


class Exchange:
    """The exchanges of one view, by the loop's thread. LinkError when one fails, and then no other may follow."""

    def __init__(self, mesh: Mesh, plan: Plan, *, arena: Arena, total: Memory, device: torch.device, step: int) -> None:
        self._mesh = mesh
        self._plan = plan
        self._own = arena.memory
        self._total = total
        self._turn = 0
        self._memory = {mesh.seat: arena.memory} | self._meet(arena, step)
        self._room = [self._rooms(bank) for bank in range(plan.banks)]
        self._additions: dict[tuple[int, ...], Addition] = {}
        self._on_device = total.tensor if device.type == "cpu" else total.tensor.to(device)
        self._result = plan.layout.views(self._on_device[: plan.layout.size_bytes])

    def _meet(self, arena: Arena, step: int) -> dict[int, Memory]:
        """Hand my arena to the peers on this host and get theirs; peers elsewhere get room for what they will send."""
        digest, found = self._plan.layout.digest, dict[int, Memory]()

        def arrange(link: Link, frame: Frame) -> list[memoryview]:
            if frame.filled != digest or frame.size < self._plan.arena_bytes(link.seat):
                raise LinkError("has a model of other shapes")
            same = link.same_host
            found[link.seat] = look_into(link.take_fd(), frame.size) if same else self._mirror(link.seat)
            return []

        for link in self._mesh.links.values():
            frame = self._frame(frames.SETUP, step, size=arena.size_bytes, filled=digest)
            link.post(frame, fd=arena.fd if link.same_host else -1)
        self._mesh.trade(frames.SETUP, step, arrange)
        return found

    def _mirror(self, seat: int) -> Memory:
        return Memory.private(self._plan.arena_bytes(seat))

    def _rooms(self, bank: int) -> dict[Node, LaneSum]:
        seat, layout = self._mesh.seat, self._plan.layout
        places = {node: self._plan.partial(seat, bank, i) for i, node in enumerate(self._plan.nodes[seat])}
        return {node: layout.views(self._own.tensor[a : a + layout.size_bytes]) for node, a in places.items()}

    def _frame(self, kind: int, step: int, *, flags: int = 0, size: int = 0, filled: int = 0) -> Frame:
        return Frame(kind, self._mesh.view, step, self._mesh.seat, flags, size, filled)

    # --- a step

    def ahead(self, step: int, sums: TreeSum[LaneSum], lane: int, *, halt: bool) -> Ahead | None:
        """Before the last lane that adds to `sums`: what takes its gradients, and sends them while others follow.

        Only in the view's second step or later: the first tells what a lane looks like here, and a step that was
        spoilt is done again in a new view, so that it gets through there. Gradients that the lane's are added to are
        taken out of `sums`.
        """
        node, met = sums.path((0, lane))
        held = sums.partials
        complete = {other: value for other, value in held.items() if other not in dict(met)}
        if self._turn == 0 or not self._far() or {*complete, node} != {*self._nodes} or node != self._nodes[-1]:
            return None
        it = self._round = self._lay_down(step, complete, node=node, halt=halt)
        self._post(it)
        self._mesh.open(frames.PARTIAL, step)
        self._progress = self._adding(it)
        others = [(_without_grads(value), first) for other, first in met if (value := held[other]) is not None]
        it.ahead = Ahead(
            self._room[it.bank][node],
            self._plan.layout.grads,
            others,
            counted=self._counted,
            ready=functools.partial(self._push, it),
        )
        return it.ahead

    def _push(self, it: Round, until: int) -> None:
        """So much is ready now. A failure is kept for `run`: backward would not know what to do with it."""
        it.ready = until
        if it.failure is None:
            try:
                self._post_more(it)
                self._mesh.advance(self._arranging(it), self._adding_further)
            except LinkError as failure:
                it.failure = failure

    def run(self, step: int, partials: Mapping[Node, LaneSum | None], *, halt: bool) -> Agreed:
        it, self._round = self._round, None
        if it is None:
            it = self._lay_down(step, partials, halt=halt)
            self._mesh.open(frames.PARTIAL, step)
                def _outcome(self, heard: Mapping[int, Frame]) -> LaneSum:
        counted = {bool(frame.flags & frames.COUNTED) for frame in heard.values() if frame.filled}
        if len(counted) > 1:
            raise LinkError("some lanes came with a count and others without")
        if self._on_device is not self._total.tensor:
            self._on_device.copy_(self._total.tensor)
        it = self._result
        return LaneSum(it.grads, it.averaged, it.first, it.loss.clone(), it.count if counted == {True} else None)

    def _lay_down(self, step: int, bank: int, partials: Mapping[Node, LaneSum | None], *, halt: bool) -> Frame:
        """My partials into my arena; the frame tells which there are."""
        room = self._room[bank]
        if partials.keys() != room.keys():
            raise ValueError(f"the sums of nodes {sorted(partials)}, where the view wants {sorted(room)}")
        self._stamp(step, bank)
        flags, filled = frames.HALT if halt else 0, 0
        for i, (node, place) in enumerate(room.items()):
            value = partials[node]
            if value is None:
                continue
            if self._turn == 1 and not self._plan.layout.fits(value):
                raise ValueError("a lane's gradients or buffers are not of the kind that the model has")
            write(place, value)
            filled |= 1 << i
            flags |= frames.COUNTED if value.count is not None else 0
        return self._frame(frames.PARTIAL, step, flags=flags, filled=filled)

    def _spread(self, heard: dict[int, Frame], bank: int) -> float:
        """Ring, or send each peer the share that it adds up; get the same from all of them, and add it up meanwhile."""
        seat, mine = self._mesh.seat, heard[self._mesh.seat]

        def arrange(link: Link, frame: Frame) -> list[memoryview]:
            if frame.filled >> len(self._plan.nodes[link.seat]) or frame.flags & ~(frames.HALT | frames.COUNTED):
                raise LinkError(f"sent {frame}, which is more than it carries")
            parts = [] if link.same_host else self._parts(link.seat, 0, frame.filled, adder=seat)
            heard[link.seat] = frame
            return _exactly(parts, frame)

        for link in self._mesh.links.values():
            parts = [] if link.same_host else self._parts(seat, bank, mine.filled, adder=link.seat)
            link.post(mine._replace(size=sum(map(len, parts))), parts)
        adding = self._adding(heard, bank)
        next(adding)
        return self._mesh.trade(frames.PARTIAL, mine.step, arrange, progress=lambda: next(adding))

    def _adding(self, heard: Mapping[int, Frame], bank: int) -> Iterator[None]:
        """Each time it is asked: add up as far as everybody's partials have arrived."""
        while len(heard) < len(self._plan.nodes):
            yield
        filled = tuple(heard[seat].filled for seat in self._plan.nodes)
        while not any(filled):
            yield
        if self._plan.phases == 2:
            self._stamp(heard[self._mesh.seat].step, 1)
        addition = self._addition(bank, filled)
        addition.restart()
        start, stop = self._plan.shares[self._mesh.seat]
        size = stop - start
        # partials come one after the other: what the last of them still lacks counts
        far = [(link, size * (heard[seat].filled.bit_count() - 1)) for seat, link in self._far() if heard[seat].filled]
        while True:
            addition.run(min((link.arrived - others for link, others in far), default=size))
            yield

    def _far(self) -> list[tuple[int, Link]]:
        return [(seat, link) for seat, link in self._mesh.links.items() if not link.same_host]

    def _parts(self, seat: int, bank: int, filled: int, *, adder: int) -> list[memoryview]:
        """Of a member's partials that are not empty: what the adder needs."""
        start, stop = self._plan.shares[adder]
        offsets = [self._plan.partial(seat, bank, i) for i in range(len(self._plan.nodes[seat])) if filled >> i & 1]
        return [self._memory[seat].raw[offset + start : offset + stop] for offset in offsets]

    def _addition(self, bank: int, filled: tuple[int, ...]) -> Addition:
        """Nearly always the same one or two."""
        key = (bank, *filled)
        if key not in self._additions:
            if len(self._additions) >= _MOST_ADDITIONS:
                self._additions.clear()
            self._additions[key] = self._new_addition(bank, filled)
        return self._additions[key]

    def _new_addition(self, bank: int, filled: tuple[int, ...]) -> Addition:
        plan, start, stop = self._plan, *self._plan.shares[self._mesh.seat]
        partials: list[tuple[Node, Tensor | None]] = []
        for (seat, nodes), mask in zip(plan.nodes.items(), filled, strict=True):
            for i, node in enumerate(nodes):
                offset = plan.partial(seat, bank if self._shared(seat) else 0, i)
                there = self._memory[seat].tensor[offset + start : offset + stop]
                partials.append((node, there if mask >> i & 1 else None))
        term = term_of(partials, plan.lanes)
        assert term is not None
        out = self._total.tensor[start:stop] if plan.phases == 1 else self._sums(self._mesh.seat)
        return Addition(term, out, plan.layout.within(start, stop))

    def _shared(self, seat: int) -> bool:
        return seat == self._mesh.seat or self._mesh.links[seat].same_host

    def _sums(self, seat: int) -> Tensor:
        start, stop = self._plan.shares[seat]
        offset = self._plan.sums(seat)
        return self._memory[seat].tensor[offset : offset + stop - start]

    def _collect(self, step: int) -> None:
        """The second phase: everybody's share into the total. What is sent arrives in its place."""
        plan, seat = self._plan, self._mesh.seat
        start, stop = plan.shares[seat]
        mine = self._own.raw[plan.sums(seat) : plan.sums(seat) + stop - start]

        def arrange(link: Link, frame: Frame) -> list[memoryview]:
            first, last = plan.shares[link.seat]
            return _exactly([] if link.same_host else [self._total.raw[first:last]], frame)

        for link in self._mesh.links.values():
            parts = [] if link.same_host else [mine]
            link.post(self._frame(frames.TOTAL, step, size=sum(map(len, parts))), parts)
        self._total.tensor[start:stop].copy_(self._sums(seat))
        self._mesh.trade(frames.TOTAL, step, arrange)
        for link in self._mesh.links.values():
            if link.same_host:
                first, last = plan.shares[link.seat]
                self._total.tensor[first:last].copy_(self._sums(link.seat))

    # --- stamps

    def _stamp(self, step: int, which: int) -> None:
        _STAMP.pack_into(self._own.raw, which * _STAMP.size, self._mesh.view, step)

    def _check_stamps(self, step: int, which: int) -> None:
        for seat, link in self._mesh.links.items():
            if link.same_host:
                found = _STAMP.unpack_from(self._memory[seat].raw, which * _STAMP.size)
                if found != (self._mesh.view, step):
                    raise PeerError(seat, "went on without this worker")


def _exactly(places: list[memoryview], frame: Frame) -> list[memoryview]:
    expected = sum(map(len, places))
    if frame.size != expected:
        raise LinkError(f"sent {frame.size} bytes instead of {expected}")
    return places
