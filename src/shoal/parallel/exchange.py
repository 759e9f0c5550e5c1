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
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.parallel.adding import Addition, term_of
from shoal.parallel.ahead import Ahead, Taken, pays
from shoal.parallel.arenas import Arenas, stamp
from shoal.parallel.exchange_plan import Plan
from shoal.parallel.flat import write
from shoal.parallel.links import frames
from shoal.parallel.links.frames import Frame
from shoal.parallel.links.link import Arrange, Link
from shoal.parallel.links.memory import Arena, Memory
from shoal.parallel.links.mesh import Mesh
from shoal.parallel.replica import LaneSum
from shoal.parallel.tree import Node, TreeSum
from shoal.wire.handshake import LinkError

_MOST_ADDITIONS = 8


@dataclass(frozen=True)
class Agreed:
    """What all members know after the exchange of a step. `total` is valid until the next; None if no lane had
    samples."""

    total: LaneSum | None
    halt: bool
    bytes_sent: int
    waited_s: float


class SpoiltError(LinkError):
    """What went ahead was not what came out in the end. The step must not count, and members must be told."""


@dataclass
class Round:
    """The exchange of one step, under way. Of my last partial, the first `ready` bytes are there."""

    mine: Frame
    bank: int
    heard: dict[int, Frame]
    ready: int
    bytes_before: int
    taken: Taken | None = None
    failure: str = ""
    addition: Addition | None = None


class Exchange:
    """The exchanges of one view, by the loop's thread. LinkError when one fails, and then no other may follow."""

    def __init__(self, mesh: Mesh, plan: Plan, *, arena: Arena, total: Memory, device: torch.device, step: int) -> None:
        self._mesh = mesh
        self._plan = plan
        self._own = arena.memory
        self._total = total
        self._turn = 0
        self._counted = False
        self._round: Round | None = None
        sizes_bytes = {seat: plan.arena_bytes(seat) for seat in plan.nodes}
        self._arenas = Arenas(mesh, arena, sizes_bytes, digest=plan.layout.digest, step=step)
        self._memory = self._arenas.memory
        self._room = [self._rooms(bank) for bank in range(plan.banks)]
        self._additions: dict[tuple[int, ...], Addition] = {}
        self._on_device = total.tensor if device.type == "cpu" else total.tensor.to(device)
        self._result = plan.layout.views(self._on_device[: plan.layout.size_bytes])

    def _rooms(self, bank: int) -> dict[Node, LaneSum]:
        seat, layout = self._mesh.seat, self._plan.layout
        places = {node: self._plan.partial(seat, bank, i) for i, node in enumerate(self._plan.nodes[seat])}
        return {node: layout.views(self._own.tensor[a : a + layout.size_bytes]) for node, a in places.items()}

    # --- a step

    def ahead(self, step: int, sums: TreeSum[LaneSum], lane: int, *, halt: bool) -> Ahead | None:
        """Before the last lane that adds to `sums`: what takes its gradients and sends them while others follow.

        Not in the first step of a view, which shows whether losses come with a count. So a step that was spoilt gets
        through when it is done again, for that is in a new view. The gradients that the lane's are added to are taken
        out of `sums`.
        """
        if not self._turn or not self._mesh.far or not pays(self._plan.layout.size_bytes):
            return None
        last, met = sums.path((0, lane))
        held = sums.partials
        passed = [(held.pop(node), first) for node, first in met]
        if [*held, last] != list(self._room[0]):
            return None
        it = self._round = self._begin(step, held, last, halt=halt)
        it.taken = Taken(set(range(len(self._plan.layout.grads))))
        return Ahead(
            self._room[it.bank][last].grads,
            self._plan.layout.grads,
            [(_take_grads(value), first) for value, first in passed if value is not None],
            taken=it.taken,
            ready=lambda until: self._push(it, until),
        )

    def _push(self, it: Round, until: int) -> None:
        """So much is ready. What fails is told later: backward would not know what to do with it."""
        it.ready = until
        if not it.failure:
            try:
                self._post_more(it)
                self._mesh.advance(self._arranging(it), lambda: self._add_up(it))
            except LinkError as failure:
                it.failure = str(failure)  # the exception itself would keep its frames alive, and memory with them

    def run(self, step: int, partials: Mapping[Node, LaneSum | None], *, halt: bool) -> Agreed:
        """If gradients went ahead, `halt` is what was said then."""
        it, self._round = self._round, None
        if it is None:
            it = self._begin(step, partials, halt=halt)
        else:
            self._complete(it, partials)
        waited_s = self._spread(it)
        self._arenas.check_stamps(step, it.bank)
        some = any(frame.filled for frame in it.heard.values())
        if some and self._plan.phases == 2:
            self._collect(step)
            self._arenas.check_stamps(step, 1)
        halting = any(frame.flags & frames.HALT for frame in it.heard.values())
        total = self._outcome(it.heard) if some else None
        return Agreed(total, halting, self._mesh.bytes_sent - it.bytes_before, waited_s)

    def _begin(
        self, step: int, partials: Mapping[Node, LaneSum | None], growing: Node | None = None, *, halt: bool
    ) -> Round:
        """Lay down what there is and let peers elsewhere have it. The `growing` partial is not there yet."""
        bank = self._turn % self._plan.banks
        self._turn += 1
        bytes_before = self._mesh.bytes_sent
        mine = self._lay_down(step, bank, partials, growing, halt=halt)
        ready = 0 if growing else self._plan.layout.size_bytes
        it = Round(mine, bank, {self._mesh.seat: mine}, ready, bytes_before)
        for link in self._mesh.far:
            parts = self._parts(self._mesh.seat, bank, mine.filled, adder=link.seat)
            frame = mine._replace(size=sum(map(len, parts)))
            later = parts.pop() if growing else b""
            link.post(frame, parts, later=len(later))
        self._mesh.open(frames.PARTIAL, step)
        return it

    def _complete(self, it: Round, partials: Mapping[Node, LaneSum | None]) -> None:
        """All gradients went ahead: what else the last partial has. LinkError if that came to nothing."""
        if it.failure:
            raise LinkError(it.failure)
        last = list(self._room[it.bank])[-1]
        value = partials.get(last)
        assert it.taken is not None
        if why := it.taken.judge(value, counted=self._counted):
            self._mesh.part(self._mesh.seat)
            raise SpoiltError(why)
        assert value is not None
        write(self._room[it.bank][last], value)
        it.ready = self._plan.layout.size_bytes

    def _outcome(self, heard: Mapping[int, Frame]) -> LaneSum:
        counted = {bool(frame.flags & frames.COUNTED) for frame in heard.values() if frame.filled}
        if len(counted) > 1:
            raise LinkError("some lanes came with a count and others without")
        if self._on_device is not self._total.tensor:
            self._on_device.copy_(self._total.tensor)
        self._counted = counted == {True}
        it = self._result
        return LaneSum(it.grads, it.averaged, it.first, it.loss.clone(), it.count if self._counted else None)

    def _lay_down(
        self, step: int, bank: int, partials: Mapping[Node, LaneSum | None], growing: Node | None, *, halt: bool
    ) -> Frame:
        """My partials into my arena; the frame tells which there are or will be."""
        room = self._room[bank]
        if partials.keys() | ({growing} if growing else ()) != room.keys():
            raise ValueError(f"the sums of nodes {sorted(partials)}, where the view wants {sorted(room)}")
        stamp(self._own, bank, view=self._mesh.view, step=step)
        flags, filled = frames.HALT if halt else 0, 0
        for i, (node, place) in enumerate(room.items()):
            value = partials.get(node)
            if value is not None:
                if self._turn == 1 and not self._plan.layout.fits(value):
                    raise ValueError("a lane's gradients or buffers are not of the kind that the model has")
                write(place, value)
                flags |= frames.COUNTED if value.count is not None else 0
            if value is not None or node == growing:
                filled |= 1 << i
        if growing and self._counted:
            flags |= frames.COUNTED
        return self._mesh.frame(frames.PARTIAL, step, flags=flags, filled=filled)

    def _spread(self, it: Round) -> float:
        """Everything is laid down: ring, or send each peer the share that it adds up; get the same from all of them,
        and add it up meanwhile."""
        for link in self._mesh.links.values():
            if link.same_host:
                link.post(it.mine)
        self._post_more(it)
        return self._mesh.finish(self._arranging(it), lambda: self._add_up(it))

    def _post_more(self, it: Round) -> None:
        """What has become ready since."""
        for link in self._mesh.far:
            if link.owes:
                start, stop = self._plan.shares[link.seat]
                growing = self._parts(self._mesh.seat, it.bank, it.mine.filled, adder=link.seat)[-1]
                link.post_more(growing[len(growing) - link.owes : max(min(it.ready, stop) - start, 0)])

    def _arranging(self, it: Round) -> Arrange:
        def arrange(link: Link, frame: Frame) -> list[memoryview]:
            if frame.filled >> len(self._plan.nodes[link.seat]) or frame.flags & ~(frames.HALT | frames.COUNTED):
                raise LinkError(f"sent {frame}, which is more than it carries")
            parts = [] if link.same_host else self._parts(link.seat, 0, frame.filled, adder=self._mesh.seat)
            it.heard[link.seat] = frame
            return exactly(parts, frame)

        return arrange

    def _add_up(self, it: Round) -> None:
        """As far as everybody's partials have arrived."""
        if len(it.heard) < len(self._plan.nodes):
            return
        filled = {seat: it.heard[seat].filled for seat in self._plan.nodes}
        if it.addition is None and any(filled.values()):
            if self._plan.phases == 2:
                stamp(self._own, 1, view=self._mesh.view, step=it.mine.step)
            it.addition = self._addition(it.bank, tuple(filled.values()))
            it.addition.restart()
        if it.addition:
            start, stop = self._plan.shares[self._mesh.seat]
            # partials come one after the other: what the last of them still lacks counts
            lasts = [
                link.arrived - (stop - start) * (filled[link.seat].bit_count() - 1)
                for link in self._mesh.far
                if filled[link.seat]
            ]
            it.addition.run(min([it.ready - start, *lasts]))

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
                offset = plan.partial(seat, bank if self._arenas.shared(seat) else 0, i)
                there = self._memory[seat].tensor[offset + start : offset + stop]
                partials.append((node, there if mask >> i & 1 else None))
        term = term_of(partials, plan.lanes)
        assert term is not None
        out = self._total.tensor[start:stop] if plan.phases == 1 else self._sums(self._mesh.seat)
        return Addition(term, out, plan.layout.within(start, stop))

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
            return exactly([] if link.same_host else [self._total.raw[first:last]], frame)

        for link in self._mesh.links.values():
            parts = [] if link.same_host else [mine]
            link.post(self._mesh.frame(frames.TOTAL, step, size=sum(map(len, parts))), parts)
        self._total.tensor[start:stop].copy_(self._sums(seat))
        self._mesh.trade(frames.TOTAL, step, arrange)
        for link in self._mesh.links.values():
            if link.same_host:
                first, last = plan.shares[link.seat]
                self._total.tensor[first:last].copy_(self._sums(link.seat))


def exactly(places: list[memoryview], frame: Frame) -> list[memoryview]:
    expected = sum(map(len, places))
    if frame.size != expected:
        raise LinkError(f"sent {frame.size} bytes instead of {expected}")
    return places


def _take_grads(value: LaneSum) -> list[Tensor]:
    grads, value.grads = value.grads, []
    return grads
