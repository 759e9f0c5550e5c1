"""What a server does with what it is told. It sees frames and no sockets.

Rules that keep every update exactly once, whoever dies:
- what is pushed is labelled with table, view and step (or lane and step); what is applied already is answered and not
  applied again;
- the primary orders, and answers only when everybody in the chain who must have it has it;
- a new table is a clean slate but for what the chunks hold: whoever waited for an answer asks again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from shoal.checkpoint.files import open_files
from shoal.parallel.cutting import Form
from shoal.parallel.flat import Layout
from shoal.parallel.links.memory import Arena, Memory, look_into
from shoal.parallel.server import frames
from shoal.parallel.server.chain import Chain
from shoal.parallel.server.desk import MOST_KEYS_BYTES, Apart, Desk
from shoal.parallel.server.frames import Frame, heard, said
from shoal.parallel.server.line import Line, Place
from shoal.parallel.server.orders import Orders, number_of, options_of
from shoal.parallel.server.post import Guest, Post
from shoal.parallel.server.shard import Shard, optimizer_of
from shoal.parallel.server.sums import SharedSums
from shoal.parallel.sparse.spec import MOST_TABLES, TableSpec
from shoal.parallel.tree import Node, nodes_of
from shoal.spec.table import Table, pieces
from shoal.wire.handshake import LinkError

STATE_OVER_PIECE = 12
STATE_SPARE_BYTES = 4 << 20
_OF_A_TABLE = frozenset({frames.ENTER, frames.PUSH, frames.PULL, frames.SET, frames.APPLY, frames.LOOK_UP, frames.KEEP})
_WORDS = {
    frames.ENTER: frames.MOST_SAID_BYTES,
    frames.HYPER: 4 << 20,
    frames.APPLY: 4 << 10,
    frames.LOOK_UP: MOST_KEYS_BYTES,
}
"""How much may be said."""


@dataclass(frozen=True)
class Terms:
    """What the job says of its servers. `staleness` may be infinite; `aware`: a stale push moves less. Where
    its checkpoints lie is `store`."""

    lanes: int
    staleness: float
    optimizer: type[torch.optim.Optimizer] | None = None
    aware: bool = False
    codec: Mapping[str, Any] | None = None
    """The job's, as plain data: what is pushed is encoded, lane by lane."""
    store: str = ""

    @property
    def synchronous(self) -> bool:
        return self.staleness == 0


class Keeper:
    """Belongs to the server's one thread. `call` asks for a line to a successor, `filled` tells that one has all."""

    def __init__(
        self,
        seat: int,
        terms: Terms,
        *,
        call: Callable[[int, Table], None],
        filled: Callable[[int, int], None],
        apart: Apart,
    ) -> None:
        self.seat = seat
        self.terms = terms
        self.table: Table | None = None
        self.posts: dict[int, Post] = {}
        self.view = 0
        self.nodes: dict[int, list[Node]] = {}
        self.model: dict[str, Any] = {}
        self.form: Form | None = None
        self.excused: frozenset[int] = frozenset()
        self.chain = Chain(self, call=call, filled=filled)
        self.desk = Desk(self, apart=apart, files=open_files(terms.store) if terms.store else None)
        self.orders = Orders(self)
        self._shard: Shard | None = None
        self._arena: Arena | None = None
        self._sums: SharedSums | None = None
        self._ready = False
        self._guests: dict[Line, Guest] = {}

    @property
    def shard(self) -> Shard:
        if self._shard is None:
            raise LinkError("speaks of a model that is not known here yet")
        return self._shard

    @property
    def number(self) -> int:
        """Of the table."""
        return self.table.number if self.table else 0

    def post(self, frame: Frame) -> Post:
        if frame.piece not in self.posts:
            raise LinkError(f"speaks of piece {frame.piece}, which is not here")
        return self.posts[frame.piece]

    # ---- tables, and who comes and goes ----

    def learn(self, table: Table) -> None:
        if table.number <= self.number:
            return
        self.table = table
        mine = [piece for piece in pieces(table) if self.seat in piece.order]
        self.posts = {piece.index: Post.of(piece, self.seat) for piece in mine}
        self.chain.close()
        self._arrange()
        for guest in self._guests.values():
            guest.line.send(Frame(frames.STALE, self.number))

    def _arrange(self) -> None:
        """Once the table and the model's shape are known."""
        if self.table is not None and self._shard is not None:
            self._let_go(self._shard)
            self._shard.arrange([(p.piece.first, p.piece.last) for p in self.posts.values()])
            self.chain.open()

    @property
    def sums(self) -> SharedSums:
        if self._sums is None:
            raise LinkError("nobody has told what the model is like")
        return self._sums

    def _let_go(self, shard: Shard) -> None:
        """Rows of chunks that others hold now would only take memory."""
        if shard.shelf is None:
            return
        mine = {i for post in self.posts.values() for i in range(post.piece.first, post.piece.last)}
        others = [i for i in range(shard.chunks) if i not in mine and int(shard.term[i])]
        for _, run in groupby(enumerate(others), key=lambda pair: pair[1] - pair[0]):
            chunks = [i for _, i in run]
            shard.drop(chunks[0], chunks[-1] + 1)

    def welcome(self, line: Line) -> list[Line]:
        """Somebody who pushes, or pulls. Returns the lines that this one takes the place of: what still comes over
        them must not be taken for what he wants now."""
        old = [one for one in self._guests if one.peer == line.peer]
        self._guests[line] = Guest(line, line.peer)
        return old

    def lost(self, line: Line) -> None:
        guest = self._guests.pop(line, None)
        self.chain.lost(line)
        if guest:
            for post in self.posts.values():
                post.asked = [one for one in post.asked if one.guest is not guest]
                post.additions.clear()

    def excuse(self, lanes: Iterable[int]) -> None:
        """Nobody waits for these lanes from now on."""
        self.excused = frozenset(lanes)
        for post in self.posts.values():
            self.orders.settle(post)

    # ---- frames ----

    def place(self, line: Line, frame: Frame) -> Place:
        guest = self._guests.get(line)
        if guest is None:
            return self.chain.place(line, frame)
        if frame.kind in _OF_A_TABLE and frame.table > self.number:
            return "hold"  # it has not come here yet
        if frame.kind == frames.PUSH:
            return self.orders.place(guest, frame)
        if frame.kind == frames.SET:
            return self.room_for_state(line, frame) if frame.table == self.number else "skip"
        most = _WORDS.get(frame.kind, 0)
        if frame.size > most:
            raise LinkError(f"says {frame.size} bytes where {most} is the most")
        return line.room(frame.size)

    def room_for_state(self, line: Line, frame: Frame) -> Place:
        """Memory for a piece's whole state, within reason."""
        piece = self.post(frame).piece
        if frame.size > STATE_OVER_PIECE * (piece.stop - piece.start) + STATE_SPARE_BYTES:
            raise LinkError(f"sends a state of {frame.size} bytes")
        return line.room(frame.size)

    def got(self, line: Line, frame: Frame) -> None:
        guest = self._guests.get(line)
        if guest is None:
            self.chain.got(line, frame)
        elif frame.kind in _OF_A_TABLE and frame.table < self.number:
            line.send(Frame(frames.STALE, self.number))
        elif frame.kind == frames.ENTER:
            self._enter(guest, frame)
        elif frame.kind == frames.READY:
            self._be_ready(guest, frame.view)
        elif frame.kind == frames.HYPER:
            guest.hyper = self.checked_hyper(heard(line.said))
        elif frame.kind == frames.ARENA:
            self._share(guest, frame)
        elif frame.kind == frames.LOOK_UP:
            self.desk.look_up(guest, frame)
        elif frame.kind == frames.KEEP:
            self.desk.keep(guest, frame)
        else:
            self.orders.take(guest, frame)

    # ---- entering a view ----

    def _enter(self, guest: Guest, frame: Frame) -> None:
        words, view = heard(guest.line.said), frame.view
        if view < self.view:
            passed = f"view {view} has passed".encode()
            guest.line.send(Frame(frames.REFUSED, self.number, view=self.view), passed)
            return
        self.check(words.get("model"))
        if view > self.view:
            self._begin_view(view, carried(words.get("carries"), by=guest.seat, lanes=self.terms.lanes))
        if guest.seat not in self.nodes:
            raise LinkError(f"enters view {view} without a part in it")
        guest.view, guest.entering = view, frame
        size = len(self.nodes[guest.seat]) * self.shard.layout.size_bytes
        alone = guest.shared is None or self.form is not None
        if alone and (guest.memory is None or len(guest.memory.raw) < size):
            guest.memory = Memory.private(size)
        if words.get("lead") and not self._ready:
            guest.line.send(Frame(frames.STATUS, frame.table, view=view), said(self._status()))
        elif words.get("ready"):
            self._ready = True
            self._let_in(guest)  # again, after it lost its line or the table has changed
        self.let_in()

    def check(self, model: Any) -> None:
        """The model's shape, the same for the whole run; whoever comes first tells it."""
        try:
            if self._shard is None:
                self._describe(model)
            elif Layout.from_description(model["layout"]).digest != self._shard.layout.digest:
                raise ValueError("other shapes")
        except Exception as failure:  # it names an optimizer and its options: anything may go wrong with them
            raise LinkError(f"describes a model that cannot be: {failure!r:.200}") from failure

    def checked_hyper(self, words: dict[str, Any]) -> dict[str, Any]:
        """Options for each of the optimizer's groups, and no more."""
        groups, clip = words.get("groups"), number_of(words.get("clip_value"))
        there = isinstance(groups, list) and len(groups) == len(self.model.get("hyper", ()))
        if not there or not all(isinstance(group, dict) for group in groups or ()):
            raise LinkError("says options for other groups than there are")
        return {"groups": groups, "clip_value": clip}

    def _describe(self, model: dict[str, Any]) -> None:
        layout = Layout.from_description(model["layout"])
        if self.terms.codec:
            self.form = Form(layout, self.terms.codec)
            layout.cuts = self.form.chunks
        if self.table is None or self.table.cuts != layout.cuts:
            raise ValueError("the table is for another one")
        self._arena, self._sums = Arena(layout.size_bytes), SharedSums.own(layout)
        self._shard = Shard(
            layout,
            optimizer=self.terms.optimizer or optimizer_of(model["optimizer"]),
            groups=[int(group) for group in model["groups"]],
            hyper=[options_of(group) for group in model["hyper"]],
            lanes=self.terms.lanes,
            parameters=self._arena.memory,
            sums=self._sums.memory,
            tables=tables_of(model.get("tables", [])),
        )
        self.model = model
        self._arrange()

    @property
    def described(self) -> bool:
        return self._shard is not None

    def _begin_view(self, view: int, carries: dict[int, list[int]]) -> None:
        """Where lanes push for themselves, each is a partial of its own."""
        if not self.terms.synchronous or self.terms.codec:
            self.nodes = {seat: [(0, lane) for lane in lanes] for seat, lanes in carries.items()}
        else:
            self.nodes = {seat: nodes_of(lanes, self.terms.lanes) for seat, lanes in carries.items()}
        self.view, self._ready = view, False
        for post in self.posts.values():
            post.forget_pushes()

    def _chunks(self) -> list[int]:
        """Those that are ordered here."""
        return [i for post in self.posts.values() if post.primary for i in range(post.piece.first, post.piece.last)]

    def _status(self) -> dict[str, Any]:
        """How far they are; `set` if all of them hold something."""
        chunks = self._chunks()
        if not chunks:
            return {"set": True}
        applied, terms = self.shard.applied[chunks], self.shard.term[chunks]
        return {"set": bool((terms > 0).all()), "low": int(applied.min()), "high": int(applied.max())}

    def _be_ready(self, guest: Guest, view: int) -> None:
        if guest.view == view == self.view:
            self._ready = True
            self.let_in()

    def let_in(self) -> None:
        """Answer those who entered, once all that happened here has reached the ends of the chains: of what they push
        next some may lie where a record is still being sent from."""
        entering = [guest for guest in self._guests.values() if guest.entering is not None]
        if self._ready and entering and all(post.clear(post.version) for post in self.posts.values() if post.primary):
            for guest in entering:
                self._let_in(guest)

    def _let_in(self, guest: Guest) -> None:
        frame, guest.entering = guest.entering, None
        if frame is not None and frame.view == self.view:
            chunks, shard = self._chunks(), self.shard
            past = shard.applied[:, None] if self.terms.synchronous else shard.clocks
            clocks = past[chunks].min(0).tolist() if chunks else []
            fd = self._arena.fd if self._arena and guest.line.same_host else -1
            answer = Frame(frames.ENTERED, frame.table, view=frame.view, number=self.shard.layout.size_bytes)
            guest.line.send(answer, said({"clocks": clocks}), fd=fd)

    def _share(self, guest: Guest, frame: Frame) -> None:
        guest.shared = look_into(guest.line.take_fd(), frame.number)
        guest.encoded = self.terms.codec is not None
        for post in self.posts.values():
            post.additions.clear()


def tables_of(descriptions: Any) -> list[TableSpec]:
    """Of a model. ValueError for what no model has."""
    tables = [TableSpec.from_description(one) for one in descriptions]
    if [table.number for table in tables] != list(range(len(tables))) or len(tables) > MOST_TABLES:
        raise ValueError("sparse tables that are not counted")
    return tables


def carried(words: Any, *, by: int, lanes: int) -> dict[int, list[int]]:
    """The lanes of each seat as they were told. LinkError unless each lane is carried once, and `by` has a part."""
    try:
        found = {int(seat): sorted(int(lane) for lane in carries) for seat, carries in words.items()}
    except (AttributeError, TypeError, ValueError, OverflowError) as failure:
        raise LinkError(f"enters with nonsense: {failure!r:.200}") from failure
    if sorted(lane for carries in found.values() for lane in carries) != list(range(lanes)) or by not in found:
        raise LinkError("enters a view that does not carry each lane once")
    return found
