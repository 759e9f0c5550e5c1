"""What a server does for sparse tables: rows that are asked for, pushed, passed on and saved.

Rows travel behind the dense bytes of the same frame, so that both count together or not at all. A whole piece's rows
may be far more than a frame takes: they go before the frame that sets the piece, and count when that one is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.checkpoint.files import Files
from shoal.errors import ShoalError
from shoal.parallel.server import frames
from shoal.parallel.server.frames import Frame, said
from shoal.parallel.server.line import Line, Place
from shoal.parallel.server.post import Guest, Post, Round
from shoal.parallel.sparse import rows as sparse
from shoal.parallel.sparse.rows import Bundle, Rows, by_table, check_keys, packed, unpacked
from shoal.parallel.sparse.saved import Saved, load, save
from shoal.parallel.sparse.shelf import Changes, Shelf, digests
from shoal.parallel.tree import TreeSum
from shoal.wire.handshake import LinkError

if TYPE_CHECKING:
    from shoal.parallel.server.keeper import Keeper

MOST_ROWS_BYTES = 512 << 20
MOST_KEYS_BYTES = 64 << 20
FRAME_BYTES = 4 << 20
Apart = Callable[[Callable[[], Any], Callable[[Any], None]], None]
"""Do the first beside everything else, and the second with what comes of it, an exception too, when it is done."""


class UnreadableError(LinkError):
    """Rows of a checkpoint cannot be had: asking again is of no use."""


class Desk:
    """Belongs to the keeper. `files` is where rows are saved."""

    def __init__(self, keeper: Keeper, *, apart: Apart, files: Files | None) -> None:
        self._keeper = keeper
        self._apart = apart
        self._files = files

    @property
    def _shelf(self) -> Shelf:
        shelf = self._keeper.shard.shelf
        if shelf is None:
            raise LinkError("speaks of rows, and the model has no sparse tables")
        return shelf

    def told(self) -> dict[str, float]:
        """How much there is."""
        shelf = self._keeper.shard.shelf if self._keeper.described else None
        return {} if shelf is None else {"rows": len(shelf), "rows_bytes": shelf.nbytes}

    # ---- behind dense bytes ----

    def room(self, line: Line, frame: Frame, dense: list[memoryview]) -> Place:
        """Where a payload goes that has rows at its end, if it is longer than what is dense."""
        size = frame.size - sum(map(len, dense))
        if size <= 0 or self._keeper.shard.shelf is None:
            return dense
        if size > MOST_ROWS_BYTES:
            raise LinkError(f"sends {size} bytes of rows, and {MOST_ROWS_BYTES} is the most")
        return [*dense, *line.room(size)]

    def pushed(self, post: Post, line: Line) -> list[Bundle]:
        """What came behind the dense bytes."""
        shelf, piece = self._keeper.shard.shelf, post.piece
        return [] if shelf is None else unpacked(line.said, shelf.dims, chunks=(piece.first, piece.last))

    def recorded(self, post: Post, line: Line) -> Changes:
        return by_table(self.pushed(post, line))

    def add_up(self, complete: Round) -> Changes:
        """Finish the tree of each table over what came."""
        if self._keeper.shard.shelf is None:
            return {}
        changes: dict[int, Rows] = {}
        for table in {bundle.table for bundles in complete.rows.values() for bundle in bundles}:
            tree: TreeSum[Rows] = TreeSum(self._keeper.terms.lanes, sparse.add)
            for seat, nodes in self._keeper.nodes.items():
                mine = {one.whose: one.rows for one in complete.rows.get(seat, ()) if one.table == table}
                for i, node in enumerate(nodes):
                    tree.push(node, mine.get(i))
            if (total := tree.total()) is not None:
                changes[table] = total
        return changes

    # ---- questions ----

    def look_up(self, guest: Guest, frame: Frame) -> None:
        """Rows of a piece, by key. Workers that take steps together say at which step they are."""
        keeper, post, table = self._keeper, self._keeper.post(frame), frame.number
        if not post.primary or table >= len(self._shelf.tables):
            raise LinkError(f"asks for rows of table {table} in piece {frame.piece}")
        keys = np.frombuffer(guest.line.said, dtype=np.int64)
        check_keys(keys, (post.piece.first, post.piece.last))
        step, applied = None, keeper.shard.applied
        if keeper.terms.synchronous:
            step, past = frame.step, applied[post.piece.first : post.piece.last]
            if past.min() < step or past.max() > step + 1:
                self.refuse(guest, f"rows at step {step} are wanted where {past.min()} is")
                return
        values = self._shelf.read(table, keys, step=step, applied=applied)
        guest.line.send(frame._replace(kind=frames.FOUND), values.data.cast("B") if len(keys) else b"")

    def keep(self, guest: Guest, frame: Frame) -> None:
        """Tell what rows there are in a piece, and save them if they are to be kept."""
        keeper, post = self._keeper, self._keeper.post(frame)
        first, last = post.piece.first, post.piece.last
        if not post.primary:
            raise LinkError(f"asks for rows of piece {frame.piece}")
        if keeper.terms.synchronous and not bool((keeper.shard.applied[first:last] == frame.step).all()):
            self.refuse(guest, f"rows at step {frame.step} are gone, or are not there yet")
            return
        contents, files = self._shelf.take(first, last), self._files
        saves = frame.flags & frames.WHOLE

        def act() -> dict[str, Any]:
            if saves and files is None:
                raise OSError("this server does not know where")
            saved = save(files, contents, first, last).describe() if saves and files else None
            return {"digests": digests(contents, first, last), "rows": list(map(len, contents)), "saved": saved}

        def then(result: Any) -> None:
            if isinstance(result, Exception):
                self.refuse(guest, f"rows were not saved: {result}")
            else:
                guest.line.send(frame._replace(kind=frames.KEPT), said(result))

        self._apart(act, then)

    def refuse(self, guest: Guest, why: str) -> None:
        guest.line.send(Frame(frames.REFUSED, self._keeper.number), why.encode())

    # ---- whole pieces ----

    def stage(self, post: Post, line: Line) -> None:
        """Rows from a predecessor, which count when the piece is set."""
        post.staged += unpacked(line.said, self._shelf.widths, chunks=(post.piece.first, post.piece.last))

    def send(self, line: Line, post: Post) -> None:
        """All rows of a piece to a successor, who gets the rest of it next."""
        if self._keeper.shard.shelf is None:
            return
        for kind, table, rows in self._shelf.take_all(post.piece.first, post.piece.last):
            for part in rows.parts(FRAME_BYTES // (8 + 4 * self._shelf.widths[table])):
                frame = Frame(frames.ROWS, self._keeper.number, post.piece.index)
                line.send(frame, *packed([Bundle(kind, table, part)]))

    def contents(self, post: Post, state: dict[str, Any]) -> list[Bundle]:
        """The rows of a piece that is set: those that were sent before, or those of a checkpoint. LinkError if they
        cannot be had."""
        staged, post.staged = post.staged, []
        saved = state.get("saved")
        if self._keeper.shard.shelf is None or not saved:
            return staged
        if self._files is None:
            raise UnreadableError("this server does not know where checkpoints lie")
        try:
            found = [Saved.from_description(one) for one in saved]
            return load(self._files, found, self._shelf.tables, post.piece.first, post.piece.last)
        except (ShoalError, ValueError, TypeError) as failure:
            raise UnreadableError(f"rows of the checkpoint cannot be had: {failure}") from failure
