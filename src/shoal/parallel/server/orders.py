"""Pushes become updates, in one order for everybody; answers follow when they may."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shoal.checkpoint import live
from shoal.parallel.cutting import Form
from shoal.parallel.links.memory import Memory
from shoal.parallel.server import frames
from shoal.parallel.server.desk import UnreadableError
from shoal.parallel.server.frames import Frame, heard
from shoal.parallel.server.line import Place
from shoal.parallel.server.post import Asked, Guest, Post, Round
from shoal.parallel.sparse.rows import scaled
from shoal.parallel.sparse.shelf import Changes
from shoal.wire.handshake import LinkError

if TYPE_CHECKING:
    from shoal.parallel.server.keeper import Keeper

_NONE: Changes = {}
_MANNER = frames.HALT | frames.COUNTED | frames.NORMS
_COUNT = (1 << 32) - 1
"""Of a stamp's `seq`: the updates since the piece was set. Above it is the view in which it was."""


@dataclass
class Seen:
    """What a server can tell of itself."""

    pushes: int = 0
    repeats: int = 0
    records: int = 0
    stale: float = 0.0
    stalest: float = 0.0


class Orders:
    """Belongs to the keeper."""

    def __init__(self, keeper: Keeper) -> None:
        self.seen = Seen()
        self._keeper = keeper
        self._lanes: dict[int, Memory] = {}

    # ---- what comes ----

    def place(self, guest: Guest, frame: Frame) -> Place:
        """Where what is pushed goes."""
        keeper = self._keeper
        if frame.table != keeper.number or not guest.view == frame.view == keeper.view:
            return "skip"
        post, size = keeper.post(frame), keeper.shard.layout.size_bytes
        if not post.primary:
            raise LinkError(f"pushes piece {frame.piece} to one that does not order it")
        partials = self._partials(guest, frame)
        if post.round is not None:
            post.round.came.pop(guest.seat, None)  # it comes again
        if frame.flags & (frames.SHARED | frames.EMPTY):
            return keeper.desk.room(guest.line, frame, [])
        if keeper.form is not None:
            return guest.line.room(len(partials) * keeper.form.part(post.piece.first)[1])
        if guest.memory is None:
            raise LinkError("said that it shares its memory")
        starts = [i * size for i in partials]
        there = [guest.memory.raw[start + post.piece.start : start + post.piece.stop] for start in starts]
        return keeper.desk.room(guest.line, frame, there)

    def _partials(self, guest: Guest, frame: Frame) -> list[int]:
        """Which of its partials somebody pushes."""
        nodes = self._keeper.nodes[guest.seat]
        if self._keeper.terms.synchronous:
            if frame.number >> len(nodes):
                raise LinkError("pushes more than it carries")
            return [i for i in range(len(nodes)) if frame.number >> i & 1]
        if (0, frame.seat) not in nodes:
            raise LinkError(f"pushes for lane {frame.seat}, which it does not carry")
        return [nodes.index((0, frame.seat))]

    def take(self, guest: Guest, frame: Frame) -> None:
        keeper = self._keeper
        if frame.kind == frames.PULL:
            post = keeper.post(frame)
            if not post.primary:
                raise LinkError(f"pulls piece {frame.piece} from one that does not order it")
            if not bool(keeper.shard.term[post.piece.first : post.piece.last].all()):
                raise LinkError(f"pulls piece {frame.piece}, which nobody has set")
            self._answer_later(post, guest, frame)
        elif not guest.view == frame.view == keeper.view:
            return  # of a view that has passed: nobody waits for an answer
        elif frame.kind == frames.PUSH:
            self._push(guest, frame)
        elif frame.kind == frames.APPLY:
            self._apply(frame, heard(guest.line.said))
        elif frame.kind == frames.SET:
            post = keeper.post(frame)
            try:
                self.put(post, guest.line.said, seq=frame.view << 32)
            except UnreadableError as failure:
                keeper.desk.refuse(guest, str(failure))
            else:
                self._answer_later(post, guest, frame)
        else:
            raise LinkError(f"sent a frame of kind {frame.kind}")

    def _push(self, guest: Guest, frame: Frame) -> None:
        form, layout = self._keeper.form, self._keeper.shard.layout
        room = len(self._keeper.nodes[guest.seat]) * (form.slot_bytes if form else layout.size_bytes)
        if frame.flags & frames.SHARED and (guest.shared is None or len(guest.shared.raw) < room):
            raise LinkError("shares too little memory")
        if guest.hyper is None:
            raise LinkError("pushes before it said what with")
        self.seen.pushes += 1
        post = self._keeper.post(frame)
        past = self._past(post, frame)
        if past > frame.step:
            self.seen.repeats += 1
            self._answer_later(post, guest, frame)
        elif past < frame.step and (self._keeper.terms.synchronous or not frame.flags & frames.EMPTY):
            why = f"step {frame.step} comes where step {past} is missing"
            guest.line.send(Frame(frames.REFUSED, self._keeper.number), why.encode())
        else:
            if form is not None and not frame.flags & frames.EMPTY:
                self._decode(form, guest, frame, post)
            (self._gather if self._keeper.terms.synchronous else self._apply_alone)(guest, frame, post)

    def _decode(self, form: Form, guest: Guest, frame: Frame, post: Post) -> None:
        """What was pushed, into the guest's partials. With a codec, every piece is one chunk."""
        at, size = form.part(post.piece.first)
        for place, i in enumerate(self._partials(guest, frame)):
            if frame.flags & frames.SHARED:
                assert guest.shared is not None
                data = guest.shared.tensor[i * form.slot_bytes + at :][:size]
            else:
                data = torch.frombuffer(guest.line.said, dtype=torch.uint8)[place * size :][:size]
            form.decode(post.piece.first, data, guest.partial(i, form.layout.size_bytes).tensor)

    def _past(self, post: Post, frame: Frame) -> int:
        """The step that the piece waits for."""
        chunks = slice(post.piece.first, post.piece.last)
        shard = self._keeper.shard
        if self._keeper.terms.synchronous:
            return int(shard.applied[chunks].min())
        if frame.seat >= self._keeper.terms.lanes:
            raise LinkError(f"speaks of lane {frame.seat}")
        return int(shard.clocks[chunks, frame.seat].min())

    # ---- all lanes together ----

    def _gather(self, guest: Guest, frame: Frame, post: Post) -> None:
        if post.round is None or (post.round.view, post.round.step) != (frame.view, frame.step):
            post.round = Round(frame.view, frame.step)
        post.round.rows[guest.seat] = self._keeper.desk.pushed(post, guest.line)
        post.round.came[guest.seat] = (guest, frame)
        if post.round.came.keys() == self._keeper.nodes.keys():
            self._add_up(post, post.round)

    def _add_up(self, post: Post, complete: Round) -> None:
        keeper, shard = self._keeper, self._keeper.shard
        told = complete.flags & (frames.NORMS | frames.COUNTED)
        if not told and (alone := post.alone(keeper.nodes, shard.layout.size_bytes)):
            self._update(post, complete, alone)
            return
        keeper.sums.begin(post)
        if not post.add_up(shard.layout, keeper.nodes, keeper.terms.lanes, shard.sums.tensor):
            for guest, _ in complete.came.values():
                guest.line.send(Frame(frames.REFUSED, keeper.number), b"no lane had samples")
            return
        complete.summed = True
        if not told:
            self._update(post, complete, shard.sums)
            return
        answer = self._sums(post, norms=bool(complete.flags & frames.NORMS))
        for guest, frame in complete.came.values():
            guest.line.send(frame._replace(kind=frames.SUMMED, flags=complete.flags), answer)

    def _sums(self, post: Post, *, norms: bool) -> memoryview:
        """What everybody must know before anybody can go on: norms, and of the tail the count."""
        shard, piece = self._keeper.shard, post.piece
        if piece.last == shard.chunks:
            return shard.sums.raw[piece.start : piece.stop]
        found = shard.norms(piece.first, piece.last) if norms else []
        return torch.tensor(found, dtype=torch.float64).numpy().data.cast("B")

    def _apply(self, frame: Frame, words: dict[str, Any]) -> None:
        """Everybody knows norm and count now; whoever says so first is believed."""
        count, coefficient = (number_of(words.get(name)) for name in ("count", "coefficient"))
        for post in self._keeper.posts.values():
            if post.round and post.round.summed and post.round.came and post.round.step == frame.step:
                self._update(post, post.round, self._keeper.shard.sums, count=count, coefficient=coefficient)

    def _update(
        self,
        post: Post,
        complete: Round,
        source: Memory,
        *,
        count: float | None = None,
        coefficient: float | None = None,
    ) -> None:
        shard, post.round = self._keeper.shard, None
        guest, _ = next(iter(complete.came.values()))
        if count is not None or coefficient is not None:
            shard.scale(post.piece.first, post.piece.last, count=count, coefficient=coefficient)
        record = Frame(frames.RECORD, step=complete.step, flags=complete.flags & _MANNER)
        if complete.flags & (frames.NORMS | frames.COUNTED):
            record = record._replace(divisor=count or 0.0, coefficient=1.0 if coefficient is None else coefficient)
        changes = {table: scaled(rows, count=count) for table, rows in self._keeper.desk.add_up(complete).items()}
        self.carry_out(post, record, guest.hyper or {}, source, changes)
        for guest, frame in complete.came.values():
            self._answer_later(post, guest, frame)

    # ---- each lane for itself ----

    def _apply_alone(self, guest: Guest, frame: Frame, post: Post) -> None:
        keeper, shard = self._keeper, self._keeper.shard
        (index,) = self._partials(guest, frame)
        updates = int(shard.seq[post.piece.first])
        steps = max(updates - guest.bases.get(post.piece.first, updates), 0) / keeper.terms.lanes
        self.seen.stale += steps
        self.seen.stalest = max(self.seen.stalest, steps)
        scale = frame.scale / max(1.0, steps) if keeper.terms.aware else frame.scale
        record = Frame(frames.RECORD, seat=frame.seat, step=frame.step, flags=frame.flags & frames.EMPTY, scale=scale)
        changes = keeper.desk.recorded(post, guest.line)
        self.carry_out(post, record, guest.hyper or {}, guest.partial(index, shard.layout.size_bytes), changes)
        self._answer_later(post, guest, frame)

    def lane_memory(self, lane: int) -> Memory:
        """Where a predecessor's records of this lane go: they may still be on their way on."""
        if lane >= self._keeper.terms.lanes:
            raise LinkError(f"speaks of lane {lane}")
        if lane not in self._lanes:
            self._lanes[lane] = Memory.private(self._keeper.shard.layout.size_bytes)
        return self._lanes[lane]

    # ---- updates, here and down the chain ----

    def carry_out(
        self, post: Post, record: Frame, hyper: dict[str, Any], source: Memory, changes: Changes = _NONE
    ) -> None:
        """One update of the piece, ordered here or upstream; then on to the successor."""
        shard, piece = self._keeper.shard, post.piece
        for first, last in self._not_yet(post, record):
            if not record.flags & frames.EMPTY:
                self._change(first, last, record, hyper, source)
                self._change_rows(first, last, record, hyper, changes)
            shard.term[first:last] = self._keeper.number
            shard.seq[first:last] += 1
            if self._keeper.terms.synchronous:
                shard.applied[first:last] = record.step + 1
                shard.manner[first:last] = record.flags & _MANNER, record.divisor, record.coefficient
        if not self._keeper.terms.synchronous:
            shard.clocks[piece.first : piece.last, record.seat] = record.step + 1
        post.version += 1
        self.seen.records += 1
        self._keeper.chain.forward(post, record, hyper, source, changes)
        self.settle(post)

    def _not_yet(self, post: Post, record: Frame) -> Iterator[tuple[int, int]]:
        """The chunks of the piece that have not had this update: nearly always all of them."""
        shard, first, last = self._keeper.shard, post.piece.first, post.piece.last
        past = shard.applied if self._keeper.terms.synchronous else shard.clocks[:, record.seat]
        lacking = past[first:last] <= record.step
        if bool(lacking.all()):
            yield first, last
            return
        for i in lacking.nonzero()[0].tolist():
            yield first + i, first + i + 1

    def _change(self, first: int, last: int, record: Frame, hyper: dict[str, Any], source: Memory) -> None:
        shard = self._keeper.shard
        if last == shard.chunks:
            self._keep_tail(source)
            return
        try:
            groups = [options_of(group) for group in hyper["groups"]]
            for group in groups:
                group["lr"] *= record.scale
            shard.apply(first, last, source=source.tensor, hyper=groups, clip_value=hyper.get("clip_value"))
        except Exception as failure:  # the options are the pusher's, and no optimizer checks all of them
            raise LinkError(f"wants an update that cannot be: {failure!r:.200}") from failure

    def _change_rows(self, first: int, last: int, record: Frame, hyper: dict[str, Any], changes: Changes) -> None:
        shelf = self._keeper.shard.shelf
        if shelf is not None:
            clip, together = hyper.get("clip_value"), self._keeper.terms.synchronous
            shelf.apply(first, last, changes, scale=record.scale, clip=clip, remember=together)

    def _keep_tail(self, source: Memory) -> None:
        """Buffers and loss. Lanes that push for themselves are blended: each moves its part of the way."""
        shard, terms = self._keeper.shard, self._keeper.terms
        here, there = shard.parameters.tensor, source.tensor
        first = not int(shard.seq[-1]) & _COUNT
        for region in shard.layout.regions:
            if region.start >= shard.layout.tail:
                old, new = region.of(here), region.of(there)
                if terms.synchronous or first or not region.added or not old.is_floating_point():
                    old.copy_(new)
                else:
                    old.lerp_(new, 1 / terms.lanes)

    def put(self, post: Post, content: bytearray, *, seq: int | None = None) -> None:
        """Take over a piece's whole state, and let the successor have it too. Nothing means: as it is."""
        shard, chunks = self._keeper.shard, slice(post.piece.first, post.piece.last)
        if content:
            try:
                state = live.unpack(bytes(content))
                rows = self._keeper.desk.contents(post, state)
                shard.put(chunks.start, chunks.stop, state)
                if shard.shelf is not None:
                    shard.shelf.put(chunks.start, chunks.stop, rows)
            except (ValueError, KeyError, TypeError) as failure:
                raise LinkError(f"sent a state that does not fit: {failure}") from failure
        if seq is not None:
            shard.term[chunks] = self._keeper.number
            shard.seq[chunks] = seq
        post.valid = True
        if content:  # else nothing has happened that the rest of the chain would have to hear of
            post.version += 1
        self._keeper.chain.again(post, changed=bool(content))

    # ---- answers ----

    def _answer_later(self, post: Post, guest: Guest, frame: Frame) -> None:
        others = [one for one in post.asked if one.guest is not guest]  # whoever asks again waits for one answer
        post.asked = [*others, Asked(guest, frame, post.version)]
        self.settle(post)

    def settle(self, post: Post) -> None:
        """Acknowledge and answer what can be."""
        while post.owed and post.clear(post.owed[0].version):
            owed = post.owed.popleft()
            owed.line.send(Frame(frames.ACK, self._keeper.number, post.piece.index, number=owed.theirs))
        if post.asked:
            may = [post.clear(one.version) and self._near(post, one.frame) for one in post.asked]
            for one, now in zip(post.asked, may, strict=True):
                if now:
                    self._answer(post, one.guest, one.frame)
            post.asked = [one for one, now in zip(post.asked, may, strict=True) if not now]

    def _near(self, post: Post, frame: Frame) -> bool:
        """Is the lane no further ahead of the slowest than it may be?"""
        terms = self._keeper.terms
        if terms.synchronous or frame.kind != frames.PUSH:
            return True
        clocks = self._keeper.shard.clocks[post.piece.first : post.piece.last]
        if excused := self._keeper.excused - {frame.seat}:
            clocks = clocks[:, [lane for lane in range(terms.lanes) if lane not in excused]]
        return frame.step + 1 - int(clocks.min()) <= terms.staleness

    def _answer(self, post: Post, guest: Guest, frame: Frame) -> None:
        shard, piece = self._keeper.shard, post.piece
        updates = int(shard.seq[piece.first])
        flags, divisor, coefficient = self._manner(post)
        answer = frame._replace(kind=frames.DONE, flags=flags, number=updates, divisor=divisor, coefficient=coefficient)
        if frame.kind == frames.SET:
            guest.line.send(answer)
        elif frame.flags & frames.WHOLE:
            state = live.pack(shard.take(piece.first, piece.last))
            guest.line.send(answer._replace(kind=frames.STATE), state)
        else:
            guest.bases[piece.first] = updates
            if guest.line.same_host and guest.view > 0:  # who never entered has no map of our memory
                guest.line.send(answer._replace(kind=frames.VALUES, flags=flags | frames.SHARED))
            else:
                values = shard.parameters.raw[piece.start : piece.stop]
                still = self._keeper.terms.synchronous and frame.kind == frames.PUSH  # nothing moves till he has them
                guest.line.send(answer._replace(kind=frames.VALUES), values if still else bytes(values))

    def _manner(self, post: Post) -> tuple[int, float, float]:
        """How the piece came to what it is, for whoever missed it: flags, divisor, coefficient."""
        rows = self._keeper.shard.manner[post.piece.first : post.piece.last]
        flags = 0
        for found in set(rows[:, 0].tolist()):
            flags |= int(found)
        _, divisor, coefficient = rows[0].tolist()
        return flags, divisor, coefficient


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists where torch wants tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}


def number_of(value: Any) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float):
        raise LinkError("says a number that is none")
    try:
        return float(value)
    except OverflowError as failure:
        raise LinkError("says a number that is too large") from failure
