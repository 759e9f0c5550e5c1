"""A server's place in the chains: what comes from those before it, and what goes on to those after it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shoal.checkpoint import live
from shoal.parallel.links.memory import Memory
from shoal.parallel.server import frames
from shoal.parallel.server.frames import Frame, heard, said
from shoal.parallel.server.line import Line, Place
from shoal.parallel.server.post import Owed, Post
from shoal.parallel.server.sums import SharedSums
from shoal.parallel.sparse.rows import Bundle, packed
from shoal.parallel.sparse.shelf import Changes
from shoal.spec.table import Table
from shoal.wire.handshake import LinkError

if TYPE_CHECKING:
    from shoal.parallel.server.keeper import Keeper

UNSENT_PARTS = 4
"""While so much waits to be sent, no further piece is begun: records must not wait behind them."""


@dataclass
class Next:
    """The way to a successor. Pieces are set one after the other, between records."""

    line: Line
    unset: deque[Post] = field(default_factory=deque)
    theirs: npt.NDArray[np.int64] | None = None
    hyper: bytes = b""
    told: bool = False


@dataclass
class Before:
    """The way from a predecessor, and its sums where they can be read."""

    hyper: dict[str, Any] = field(default_factory=dict)
    shared: SharedSums | None = None


class Chain:
    """Belongs to the keeper."""

    def __init__(
        self, keeper: Keeper, *, call: Callable[[int, Table], None], filled: Callable[[int, int], None]
    ) -> None:
        self._keeper = keeper
        self._call = call
        self._filled = filled
        self._next: dict[int, Next] = {}
        self._before: dict[Line, Before] = {}

    # ---- lines ----

    def open(self) -> None:
        """Reach everybody who comes right after this server in some chain."""
        assert self._keeper.table is not None
        for seat in sorted({post.after for post in self._keeper.posts.values() if post.after is not None}):
            if seat not in self._next:
                self._call(seat, self._keeper.table)

    def connected(self, seat: int, line: Line, table: int) -> bool:
        """A line to a successor, as it was called for; False if it is not wanted any more."""
        keeper = self._keeper
        if keeper.number != table or seat in self._next or not keeper.described:
            return False
        self._next[seat] = Next(line)
        fd = keeper.sums.fd if line.same_host else -1
        line.send(Frame(frames.JOIN, table, seat=keeper.seat, number=fd >= 0), said({"model": keeper.model}), fd=fd)
        return True

    def admit(self, line: Line) -> list[Line]:
        """Somebody who comes before this server. Returns the lines that this one takes the place of."""
        old = [one for one in self._before if one.peer == line.peer]
        self._before[line] = Before()
        return old

    def lost(self, line: Line) -> None:
        self._before.pop(line, None)
        for seat, way in list(self._next.items()):
            if way.line is line:
                del self._next[seat]
                for post in self._after(seat):
                    post.synced = False  # it tells what it has when it is reached again
                assert self._keeper.table is not None
                self._call(seat, self._keeper.table)

    def close(self) -> None:
        """Another table: everybody is reached anew."""
        lines = [way.line for way in self._next.values()] + list(self._before)
        self._next, self._before = {}, {}
        for line in lines:
            line.close()

    def _after(self, seat: int) -> list[Post]:
        return [post for post in self._keeper.posts.values() if post.after == seat]

    # ---- frames ----

    def place(self, line: Line, frame: Frame) -> Place:
        keeper = self._keeper
        if line in self._before:
            return self._place_before(line, frame)
        most = 16 * len(keeper.table.cuts) if keeper.table and frame.kind == frames.STAMPS else 0
        if frame.kind not in (frames.STAMPS, frames.ACK) or frame.size > most:
            raise LinkError(f"answers with {frame.size} bytes of kind {frame.kind}")
        return line.room(frame.size)

    def _place_before(self, line: Line, frame: Frame) -> Place:
        keeper = self._keeper
        if frame.table > keeper.number:
            return "hold"
        if frame.table < keeper.number:
            raise LinkError(f"orders by table {frame.table}, and {keeper.number} counts")
        if frame.kind in (frames.SET, frames.RECORD, frames.ROWS):
            post = keeper.post(frame)
            if post.before != line.peer:
                raise LinkError(f"orders piece {frame.piece}, which it does not come before")
            if frame.kind == frames.SET:
                return keeper.room_for_state(line, frame) if frame.size else []
            if frame.kind == frames.ROWS:
                return keeper.desk.room(line, frame, [])
            if frame.flags & frames.EMPTY:
                return []
            there = [] if frame.flags & frames.SHARED else [self._room(line, frame).part(*post.piece.bytes).raw]
            return keeper.desk.room(line, frame, there)
        if frame.kind not in (frames.JOIN, frames.HYPER) or frame.size > frames.MOST_SAID_BYTES:
            raise LinkError(f"sends {frame.size} bytes of kind {frame.kind}")
        return line.room(frame.size)

    def _room(self, line: Line, frame: Frame) -> Memory:
        """Where a record's content lies."""
        keeper = self._keeper
        if not keeper.terms.synchronous:
            return keeper.orders.lane_memory(frame.seat)
        if not frame.flags & frames.SHARED:
            return keeper.shard.sums
        shared = self._before[line].shared
        if shared is None:
            raise LinkError("shares no memory")
        return shared.memory

    def got(self, line: Line, frame: Frame) -> None:
        if line in self._before:
            self._from_before(line, frame)
        elif frame.kind == frames.STAMPS:
            self._compare(line, frame)
        else:
            self._acked(line, frame)

    def _from_before(self, line: Line, frame: Frame) -> None:
        keeper = self._keeper
        if frame.kind == frames.JOIN:
            self._joined(line, frame)
        elif frame.kind == frames.HYPER:
            self._before[line].hyper = heard(line.said)
        elif frame.kind == frames.ROWS:
            keeper.desk.stage(keeper.post(frame), line)
        else:
            post = self._keeper.post(frame)
            if frame.kind == frames.SET:
                keeper.orders.put(post, line.said if frame.size else bytearray())
            else:
                self._recorded(line, frame, post)
            post.owed.append(Owed(line, frame.number, post.version))
            keeper.orders.settle(post)

    def _recorded(self, line: Line, frame: Frame, post: Post) -> None:
        """Where the content lies in the predecessor's memory, it may be that of a later step: one that waits for this
        server no longer goes on. What was made of it is worth nothing then."""
        changes, before = self._keeper.desk.recorded(post, line), self._before[line]
        record, source = frame._replace(flags=frame.flags & ~frames.SHARED), self._room(line, frame)
        shared = before.shared if frame.flags & frames.SHARED else None
        if shared and shared.count(post) != frame.view:
            raise LinkError("has gone on")
        self._keeper.orders.carry_out(post, record, before.hyper, source, changes)
        if shared and shared.count(post) != frame.view:
            self._keeper.shard.drop(post.piece.first, post.piece.last)
            raise LinkError("has gone on")

    def _joined(self, line: Line, frame: Frame) -> None:
        """Whoever comes before this server wants to know what it has."""
        keeper = self._keeper
        keeper.check(heard(line.said).get("model"))
        if frame.number:
            self._before[line].shared = SharedSums.of_another(line.take_fd(), keeper.shard.layout)
        for post in keeper.posts.values():
            if post.before == line.peer:
                post.staged = []  # it begins again
        stamps = np.stack([keeper.shard.term, keeper.shard.seq])
        line.send(Frame(frames.STAMPS, frame.table, seat=keeper.seat), stamps.data.cast("B"))

    # ---- to the successor ----

    def _compare(self, line: Line, frame: Frame) -> None:
        """What the successor has; the rest follows."""
        keeper = self._keeper
        way = self._way(line)
        if frame.size != 16 * len(keeper.shard.term):
            raise LinkError("has another number of chunks")
        way.theirs = np.frombuffer(line.said, dtype=np.int64).reshape(2, -1).copy()
        way.unset.extend(post for post in self._after(line.peer) if post.valid)
        self.pump()

    def _way(self, line: Line) -> Next:
        way = self._next.get(line.peer)
        if way is None or way.line is not line:
            raise LinkError("answers where nothing was asked")
        return way

    def again(self, post: Post, *, changed: bool) -> None:
        """The piece was set here: the successor needs it too, whole if it was changed."""
        way = self._next.get(post.after) if post.after is not None else None
        if way is not None and way.theirs is not None:
            if changed:
                way.theirs[:, post.piece.first : post.piece.last] = -1
            if changed or not post.synced:
                post.synced = False
                if post not in way.unset:
                    way.unset.append(post)
                self.pump()

    def pump(self) -> None:
        """Set what is unset, as far as the lines are free."""
        for way in self._next.values():
            while way.unset and way.line.unsent < UNSENT_PARTS:
                self._set(way, way.unset.popleft())

    def _set(self, way: Next, post: Post) -> None:
        keeper, piece = self._keeper, post.piece
        assert way.theirs is not None
        chunks = slice(piece.first, piece.last)
        mine = np.stack([keeper.shard.term[chunks], keeper.shard.seq[chunks]])
        same = np.array_equal(mine, way.theirs[:, chunks])
        empty = not bool(mine[0].all())  # as nobody holds all of it, somebody will set it
        content = b"" if same or empty else live.pack(keeper.shard.take(piece.first, piece.last))
        if content:
            keeper.desk.send(way.line, post)
        frame = Frame(frames.SET, keeper.number, piece.index, number=post.version)
        way.line.send(frame, content)
        post.synced = post.waits = True

    def forward(self, post: Post, record: Frame, hyper: dict[str, Any], source: Memory, changes: Changes) -> None:
        """A record that was applied here."""
        way = self._next.get(post.after) if post.after is not None else None
        if way is None or not post.synced:
            return
        table = self._keeper.number
        words = json.dumps(hyper, separators=(",", ":")).encode()
        if words != way.hyper:
            way.line.send(Frame(frames.HYPER, table), words)
            way.hyper = words
        frame = record._replace(kind=frames.RECORD, table=table, piece=post.piece.index, number=post.version)
        content: memoryview | bytes = b""
        if way.line.same_host and source is self._keeper.sums.memory:
            frame = frame._replace(flags=frame.flags | frames.SHARED, view=self._keeper.sums.count(post))
        elif not record.flags & frames.EMPTY:
            content = source.part(*post.piece.bytes).raw
        way.line.send(frame, content, *packed([Bundle(0, i, rows) for i, rows in changes.items()]))

    def _acked(self, line: Line, frame: Frame) -> None:
        post = self._keeper.post(frame)
        if frame.number > post.version or post.after != self._way(line).line.peer:
            raise LinkError("acknowledges what was not sent")
        post.acked = max(post.acked, frame.number)
        self._keeper.orders.settle(post)
        self._keeper.let_in()
        self._tell_filled(post)

    def _tell_filled(self, post: Post) -> None:
        """Once all that a successor is being filled with is there."""
        way = self._next.get(post.after) if post.after is not None else None
        if way is None or way.told:
            return
        posts = [p for p in self._after(way.line.peer) if way.line.peer in p.piece.filling]
        if posts and all(p.synced and p.acked for p in posts):
            way.told = True
            self._filled(way.line.peer, self._keeper.number)
