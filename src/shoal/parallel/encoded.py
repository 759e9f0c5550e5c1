"""The exchange of encoded lanes: everybody gets every lane's bytes, decodes them, and adds them on the fixed tree.

A lane is encoded where it is carried, by itself, with what it remembers itself: so its bytes do not depend on who
carries it, and neither does the sum. One phase, two banks, as in `exchange`: a bank is written again two steps later,
and by then every peer has rung for the step in between, which it does after it has read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoal.parallel.ahead import Ahead, Met, Taken, pays
from shoal.parallel.arenas import STAMPS_BYTES, UNFINISHED, Arenas, stamp
from shoal.parallel.cutting import Form, Remembered, Summing
from shoal.parallel.exchange import Agreed, SpoiltError, exactly
from shoal.parallel.flat import write
from shoal.parallel.links import frames
from shoal.parallel.links.frames import Frame
from shoal.parallel.links.link import Arrange, Link
from shoal.parallel.links.memory import Arena, Memory
from shoal.parallel.links.mesh import Mesh
from shoal.parallel.replica import LaneSum, add
from shoal.parallel.tree import Node, TreeSum
from shoal.wire.handshake import LinkError

BANKS = 2
_MOST_SUMMINGS = 8


class Lanes(Protocol):
    """What lanes remember."""

    def begin_step(self) -> None: ...

    def of(self, lane: int) -> Remembered: ...


def arena_bytes(form: Form, lanes: int) -> int:
    """What a worker needs that carries so many lanes."""
    return STAMPS_BYTES + BANKS * lanes * form.slot_bytes


class Round(TreeSum[LaneSum]):
    """One step, under way: takes this worker's lanes in rising order and encodes each as soon as it is there.

    Of the last lane so far, `ready` parts are encoded. When gradients go ahead, `posted` of its parts are on the way,
    and they may be `summed` with what the lane remembers.
    """

    def __init__(self, exchange: EncodedExchange, lanes: int, bank: int) -> None:
        super().__init__(lanes, add)
        self.bank = bank
        self.filled = 0
        self.counted = False
        self.summed = False
        self.slot = 0
        self.ready = 0
        self.posted = 0
        self.mine: Frame | None = None
        self.taken: Taken | None = None
        self.failure = ""
        self.spoilt = ""
        self.heard: dict[int, Frame] = {}
        self.summing: Summing | None = None
        self.bytes_before = 0
        self.exchange = exchange

    def push(self, node: Node, value: LaneSum | None) -> None:
        """Lanes alone: they are added up when they are decoded."""
        if value is not None:
            self.exchange.lay_down(self, node[1], value)


class EncodedExchange:
    """The steps of one view, by the loop's thread; without a mesh, of a worker that carries all lanes. LinkError when
    one fails, and then no other may follow."""

    def __init__(
        self,
        form: Form,
        carries: Mapping[int, Sequence[int]],
        seat: int,
        *,
        mesh: Mesh | None,
        arena: Arena,
        stretch: Memory,
        total: Memory,
        memories: Lanes | None,
        device: torch.device,
    ) -> None:
        if max(map(len, carries.values())) > frames.MOST_NODES:
            raise ValueError(f"a member carries more than {frames.MOST_NODES} lanes")
        self._form = form
        self._carries = {seat: sorted(lanes) for seat, lanes in sorted(carries.items())}
        self._seat = seat
        self._mesh = mesh
        self._arena = arena
        self._stretch = stretch.tensor
        self._lane = form.layout.views(stretch.tensor)
        self._total = total
        self._memories = memories
        self._arenas: Arenas | None = None
        self._turn = 0
        self._counted = False
        self._summings: dict[tuple[int, ...], Summing] = {}
        self._banks: dict[int, list[Tensor]] = {}
        self._on_device = total.tensor if device.type == "cpu" else total.tensor.to(device)
        self._result = form.layout.views(self._on_device)

    # --- this worker's lanes

    def begin(self) -> Round:
        bank = self._turn % BANKS
        self._turn += 1
        if self._memories:
            self._memories.begin_step()
        stamp(self._arena.memory, bank, view=self._view, step=UNFINISHED)
        return Round(self, sum(map(len, self._carries.values())), bank)

    def lay_down(self, it: Round, lane: int, value: LaneSum) -> None:
        """Encode a lane, or what is left of it where its gradients went ahead."""
        if it.taken is None:
            if self._turn == 1 and not self._form.layout.fits(value):
                raise ValueError("a lane's gradients or buffers are not of the kind that the model has")
            self._open(it, lane)
        else:
            it.spoilt = it.taken.judge(value, counted=self._counted)
        it.counted = value.count is not None
        write(self._lane, value)
        self._encode(it, lane, self._form.grads_bytes)
        self._form.lay_down_tail(self._stretch, self._slot(self._seat, it.bank, it.slot))
        it.ready += 1

    def _open(self, it: Round, lane: int) -> None:
        it.slot, it.ready = self._carries[self._seat].index(lane), 0
        it.filled |= 1 << it.slot

    def _encode(self, it: Round, lane: int, until: int) -> None:
        """As far as the first `until` bytes of the stretch are there."""
        cuts = self._form.cuts
        slot = self._slot(self._seat, it.bank, it.slot)
        memory = self._memories.of(lane) if self._memories else None
        while it.ready < len(cuts) and cuts[it.ready].stop <= until:
            cuts[it.ready].encode(self._stretch, slot, memory, keep=self._form.remembers, summed=it.summed)
            it.ready += 1

    # --- with others

    def ahead(self, it: Round, step: int, lane: int, *, halt: bool) -> Ahead | None:
        """Before the last lane: what takes its gradients, encodes them and sends them while others follow. Not in the
        first step of a view, as in `Exchange`."""
        mesh = self._mesh
        if mesh is None or self._arenas is None or not mesh.far or not pays(self._form.grads_bytes):
            return None
        self._open(it, lane)
        self._post(it, mesh, step, halt=halt, growing=True)
        mesh.open(frames.PARTIAL, step)
        it.taken = Taken(set(range(len(self._form.layout.grads))))
        room, met = self._room(it, lane)
        places = self._form.layout.grads
        return Ahead(room, places, met, taken=it.taken, ready=lambda until: self._push(it, mesh, lane, until))

    def _room(self, it: Round, lane: int) -> tuple[list[Tensor], Met]:
        """Where the gradients go, and what they meet there: what the lane remembers, if it can be added at once."""
        form = self._form
        before, after = self._memories.of(lane).part(0, form.memory_floats) if self._memories else (None, None)
        if before is None or after is None or not form.adds:
            return self._lane.grads, []
        it.summed = True
        if not {before.data_ptr(), after.data_ptr()} <= self._banks.keys():  # they swap; views are made once
            self._banks = {bank.data_ptr(): form.remembered(bank) for bank in (before, after)}
        return self._banks[after.data_ptr()], [(self._banks[before.data_ptr()], False)]

    def _push(self, it: Round, mesh: Mesh, lane: int, until: int) -> None:
        """So much is ready. What fails is told later: backward would not know what to do with it."""
        self._encode(it, lane, until)
        if not it.failure:
            try:
                self._post_more(it, mesh)
                mesh.advance(self._arranging(it))
            except LinkError as failure:
                it.failure = str(failure)  # the exception itself would keep its frames alive, and memory with them

    def run(self, it: Round, step: int, *, halt: bool) -> Agreed:
        """If gradients went ahead, `halt` is what was said then."""
        if self._mesh is None:
            mine = Frame(frames.PARTIAL, 0, step, self._seat, self._flags(it.counted, halt), filled=it.filled)
            it.heard = {self._seat: mine}
            self._add_up(it)
            return self._agreed(it, 0.0)
        waited_s = self._trade(it, self._mesh, step, halt=halt)
        assert self._arenas is not None
        self._arenas.check_stamps(step, it.bank)
        return self._agreed(it, waited_s)

    def _trade(self, it: Round, mesh: Mesh, step: int, *, halt: bool) -> float:
        if self._arenas is None:
            sizes_bytes = {seat: arena_bytes(self._form, len(lanes)) for seat, lanes in self._carries.items()}
            self._arenas = Arenas(mesh, self._arena, sizes_bytes, digest=self._form.digest, step=step)
        if it.failure:
            raise LinkError(it.failure)
        if it.taken is None:
            self._post(it, mesh, step, halt=halt, growing=False)
            mesh.open(frames.PARTIAL, step)
        elif it.spoilt or it.taken.missing:
            mesh.part(self._seat)
            raise SpoiltError(it.spoilt or "not all gradients went ahead")
        self._post_more(it, mesh)
        assert it.mine is not None
        stamp(self._arena.memory, it.bank, view=self._view, step=step)
        for link in mesh.links.values():
            if link.same_host:
                link.post(it.mine)
        return mesh.finish(self._arranging(it), lambda: self._add_up(it))

    def _post(self, it: Round, mesh: Mesh, step: int, *, halt: bool, growing: bool) -> None:
        """To peers elsewhere: the lanes that there are. A `growing` last one follows."""
        flags = self._flags(self._counted if growing else it.counted, halt)
        it.mine = mesh.frame(frames.PARTIAL, step, flags=flags, filled=it.filled)
        it.heard[self._seat] = it.mine
        it.bytes_before = mesh.bytes_sent
        parts = self._parts(self._seat, it.bank, it.filled)
        later = len(self._form.cuts) + 1 if growing else 0
        frame = it.mine._replace(size=sum(map(len, parts)))
        for link in mesh.far:
            link.post(frame, parts[: len(parts) - later], later=self._form.sent_bytes if growing else 0)
        it.posted = 0 if growing else it.ready

    def _post_more(self, it: Round, mesh: Mesh) -> None:
        """What has become ready since."""
        parts = self._parts(self._seat, it.bank, 1 << it.slot)[it.posted : it.ready]
        for link in mesh.far:
            for part in parts:
                link.post_more(part)
        it.posted = it.ready

    def _arranging(self, it: Round) -> Arrange:
        def arrange(link: Link, frame: Frame) -> list[memoryview]:
            if frame.filled >> len(self._carries[link.seat]) or frame.flags & ~(frames.HALT | frames.COUNTED):
                raise LinkError(f"sent {frame}, which is more than it carries")
            it.heard[link.seat] = frame
            return exactly([] if link.same_host else self._parts(link.seat, 0, frame.filled), frame)

        return arrange

    # --- the sum

    def _add_up(self, it: Round) -> None:
        """As far as everybody's lanes have arrived."""
        if len(it.heard) < len(self._carries):
            return
        filled = {seat: it.heard[seat].filled for seat in self._carries}
        if it.summing is None and any(filled.values()):
            it.summing = self._summing(it.bank, tuple(filled.values()))
            it.summing.restart()
        if it.summing:
            sent_bytes = self._form.sent_bytes
            # lanes come one after the other: what the last of them still lacks counts
            far = self._mesh.far if self._mesh else []
            lasts = [
                link.arrived - sent_bytes * (filled[link.seat].bit_count() - 1) for link in far if filled[link.seat]
            ]
            it.summing.run(min([sent_bytes, *lasts]))

    def _summing(self, bank: int, filled: tuple[int, ...]) -> Summing:
        """Nearly always the same one or two."""
        key = (bank, *filled)
        if key not in self._summings:
            if len(self._summings) >= _MOST_SUMMINGS:
                self._summings.clear()
            slots = {
                lane: self._slot(seat, bank, i) if mask >> i & 1 else None
                for (seat, lanes), mask in zip(self._carries.items(), filled, strict=True)
                for i, lane in enumerate(lanes)
            }
            self._summings[key] = Summing(self._form, slots, self._total.tensor, kept=self._kept(slots))
        return self._summings[key]

    def _kept(self, slots: Mapping[int, Tensor | None]) -> tuple[Tensor, Tensor] | None:
        """This worker's last lane: what others will decode still lies where it was encoded."""
        mine = [slot for lane in self._carries[self._seat] if (slot := slots[lane]) is not None]
        return (mine[-1], self._stretch) if mine and self._form.remembers else None

    def _agreed(self, it: Round, waited_s: float) -> Agreed:
        halt = any(frame.flags & frames.HALT for frame in it.heard.values())
        sent = self._mesh.bytes_sent - it.bytes_before if self._mesh else 0
        counted = {bool(frame.flags & frames.COUNTED) for frame in it.heard.values() if frame.filled}
        if not counted:
            return Agreed(None, halt, sent, waited_s)
        if len(counted) > 1:
            raise LinkError("some lanes came with a count and others without")
        self._counted = counted == {True}
        if self._on_device is not self._total.tensor:
            self._on_device.copy_(self._total.tensor)
        found = self._result
        count = found.count if self._counted else None
        total = LaneSum(found.grads, found.averaged, found.first, found.loss.clone(), count)
        return Agreed(total, halt, sent, waited_s)

    # --- places

    @property
    def _view(self) -> int:
        return self._mesh.view if self._mesh else 0

    def _memory(self, seat: int) -> Memory:
        return self._arena.memory if seat == self._seat or self._arenas is None else self._arenas.memory[seat]

    def _start(self, seat: int, bank: int, index: int) -> int:
        """Where a slot begins. Of peers elsewhere there is one bank: they send again when this one was read."""
        if seat != self._seat and self._arenas and not self._arenas.shared(seat):
            bank = 0
        return STAMPS_BYTES + (bank * len(self._carries[seat]) + index) * self._form.slot_bytes

    def _slot(self, seat: int, bank: int, index: int) -> Tensor:
        start = self._start(seat, bank, index)
        return self._memory(seat).tensor[start : start + self._form.slot_bytes]

    def _parts(self, seat: int, bank: int, filled: int) -> list[memoryview]:
        """What is sent of a member's lanes that are not empty."""
        raw, size = self._memory(seat).raw, self._form.slot_bytes
        starts = [self._start(seat, bank, i) for i in range(len(self._carries[seat])) if filled >> i & 1]
        return [part for start in starts for part in self._form.sent(raw[start : start + size])]

    def _flags(self, counted: bool, halt: bool) -> int:
        return (frames.HALT if halt else 0) | (frames.COUNTED if counted else 0)
