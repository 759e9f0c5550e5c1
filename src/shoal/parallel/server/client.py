"""The worker's end: errands to all servers at once, which survive the death of some of them.

An errand has something to ask for each piece and wants an answer for each. Whatever has no answer yet when the table
changes is asked again, of whoever is in charge then. Nothing here knows of tensors.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.parallel.links.endpoint import reach
from shoal.parallel.links.memory import Arena, Memory, look_into
from shoal.parallel.server import frames
from shoal.parallel.server.frames import Frame, heard, said
from shoal.parallel.server.line import Line, Place
from shoal.spec.table import Piece, Table, pieces
from shoal.wire.bell import Bell
from shoal.wire.handshake import LinkError

CALL_AGAIN_S = 0.05


class RefusedError(LinkError):
    """A server says no, and would say it again."""


class PassedError(LinkError):
    """Others have gone on to a later view."""


@dataclass
class Server:
    """A server as a worker knows it. Its values lie in `memory`, where that is shared."""

    line: Line
    status: dict[str, Any] | None = None
    clocks: list[int] | None = None
    memory: Memory | None = None
    greeted: tuple[int, int] = (0, 0)
    hyper: bytes = b""

    def tell_hyper(self, frame: Frame, words: bytes) -> None:
        """If it does not know them yet."""
        if words != self.hyper:
            self.line.send(frame._replace(kind=frames.HYPER), words)
            self.hyper = words


class Errand(Protocol):
    def settled(self, chunks: int) -> list[bool]:
        """Which of so many chunks nothing is wanted of."""

    def ask(self, server: Server, piece: Piece, frame: Frame) -> None:
        """Send a request. `frame` names table, piece, view and seat."""

    def place(self, server: Server, piece: Piece, frame: Frame) -> Place:
        """Where the answer goes."""

    def answered(self, server: Server, piece: Piece, frame: Frame) -> bool:
        """The answer is there; False if another one must follow."""

    def answer_all(self) -> Callable[[Server, Frame], None] | None:
        """Every piece that is not done got its first answer: what to tell each server now."""


@dataclass
class Entry:
    """How to enter a view: what to say, the memory to share, and, for the one who leads, what to do when servers do
    not hold what they should: an errand, or None if all is well."""

    view: int
    words: Mapping[str, Any]
    arena: Arena | None = None
    judge: Callable[[list[dict[str, Any]]], Errand | None] | None = None
    judged: bool = field(default=False, init=False)
    ready: bool = field(default=False, init=False)


class Client:
    """Used by one thread; `learn` and `wake` may come from any."""

    def __init__(self, seat: int, token: str, *, aborted: Callable[[], bool]) -> None:
        self.seat = seat
        self.bytes_sent = 0
        self.waited_s = 0.0
        self.table: Table | None = None
        self._token = token
        self._aborted = aborted
        self._newest: Table | None = None
        self._bell = Bell()
        self._servers: dict[int, Server] = {}
        self._entry: Entry | None = None
        self._pieces: list[Piece] = []
        self._seats: list[int] = []  # whom the table says to ask
        self._least = 0  # no table before this one is worth asking by
        self._errand: Errand | None = None
        self._open: dict[int, bool] = {}  # pieces that were asked for; True: the first answer is there
        self._done: list[bool] = []  # chunks
        self._told = False

    # ---- from any thread ----

    def learn(self, table: Table) -> None:
        if self._newest is None or table.number > self._newest.number:
            self._newest = table
        self._bell.ring()

    def wake(self) -> None:
        """Look whether it was aborted."""
        self._bell.ring()

    # ---- views ----

    @property
    def _view(self) -> int:
        """0: it only looks on, and may pull."""
        return self._entry.view if self._entry else 0

    def enter(self, entry: Entry) -> list[int]:
        """Be let in by all servers; returns the step at which each lane goes on, where lanes push for themselves."""
        self._entry = entry
        self._until(lambda: self.table is not None)
        while not self._enter(entry, self._number):
            pass
        entry.ready = True
        clocks = [server.clocks for server in self._servers.values() if server.clocks]
        return [min(column) for column in zip(*clocks, strict=True)]

    def _enter(self, entry: Entry, number: int) -> bool:
        """By this table. False if there was another one before all had let us in."""
        for server in self._servers.values():
            self._greet(server)
        if entry.judge and not entry.judged:
            self._until(lambda: self._all(number, lambda s: s.status is not None or s.clocks is not None))
            if self._number != number:
                return False
            self._lead(entry, entry.judge)
        self._until(lambda: self._all(number, lambda s: s.clocks is not None))
        return self._number == number

    def _lead(self, entry: Entry, judge: Callable[[list[dict[str, Any]]], Errand | None]) -> None:
        errand = judge([server.status for server in self._servers.values() if server.status is not None])
        if errand is not None:
            self.run(errand)
        entry.judged = True  # others may push from now on: what servers hold must not be set again
        for server in self._servers.values():
            server.line.send(Frame(frames.READY, self._number, view=entry.view, seat=self.seat))

    @property
    def _number(self) -> int:
        return self.table.number if self.table else 0

    def _all(self, number: int, holds: Callable[[Server], bool]) -> bool:
        """Does it hold for all servers of this table? True also when there is another table by now."""
        if self._number != number:
            return True
        return all(seat in self._servers and holds(self._servers[seat]) for seat in self._seats)

    def _greet(self, server: Server) -> None:
        entry, line = self._entry, server.line
        assert entry is not None
        if server.greeted == (entry.view, self._number):
            return
        server.greeted = (entry.view, self._number)
        server.status = server.clocks = None
        if entry.arena is not None and line.same_host:
            line.send(Frame(frames.ARENA, self._number, number=entry.arena.size_bytes), fd=entry.arena.fd)
        leads = entry.judge is not None and not entry.judged
        words = {**entry.words, "lead": leads, "ready": entry.ready or entry.judged}
        line.send(Frame(frames.ENTER, self._number, view=entry.view, seat=self.seat), said(words))

    # ---- errands ----

    def run(self, errand: Errand) -> None:
        """Until each piece has its last answer. LinkError when it is aborted, RefusedError when a server says no."""
        self._errand, self._open, self._done, self._told = errand, {}, [], False
        try:
            self._until(self._finished)
        finally:
            self._errand = None

    def _finished(self) -> bool:
        if self.table is None or self._errand is None:
            return False
        self._done = self._done or self._errand.settled(len(self.table.chains))
        waiting = [piece for piece in self._pieces if not all(self._done[piece.first : piece.last])]
        if self._number >= self._least:
            for piece in waiting:
                if piece.index not in self._open and (server := self._servers.get(piece.primary)) is not None:
                    self._open[piece.index] = False
                    self._errand.ask(server, piece, self._frame(piece.index))
        if waiting and not self._told and all(self._open.get(piece.index) for piece in waiting):
            self._told = True
            if tell := self._errand.answer_all():
                for seat in {piece.primary for piece in waiting}:
                    tell(self._servers[seat], self._frame(0))
        return not waiting

    def _frame(self, piece: int) -> Frame:
        return Frame(0, self._number, piece, self._view, self.seat)

    # ---- waiting ----

    def _until(self, done: Callable[[], bool]) -> None:
        while True:
            self._look_up()
            if done():
                self._flush()
                return
            self._flush()
            self._wait()

    def _look_up(self) -> None:
        """An end to all this, or another table? Then whoever is in it is called."""
        self._bell.clear()
        if self._aborted():
            raise LinkError("aborted")
        newest = self._newest
        if newest is not None and newest.number > self._number:
            self.table, self._pieces, self._seats = newest, pieces(newest), newest.primaries()
            self._open, self._told = {}, False
            for seat in self._servers.keys() - set(self._seats):
                self._drop(seat)
            for server in self._servers.values():
                if self._entry is not None and server.clocks is None:
                    self._greet(server)  # it may have been too far ahead to let us in by the last table
        if self.table is not None:
            for seat in self._seats:
                if seat not in self._servers:
                    self._call(seat, self.table)

    def _call(self, seat: int, table: Table) -> None:
        try:
            sock = reach(table.addresses[seat], self._token, purpose="push", seat=self.seat, view=self._view)
        except LinkError:
            return
        self._servers[seat] = Server(Line(sock, seat))
        if self._entry is not None:
            self._greet(self._servers[seat])

    def _flush(self) -> None:
        for seat, server in list(self._servers.items()):
            try:
                server.line.flush()
            except LinkError:
                self._drop(seat)

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        lines = {server.line.fileno(): seat for seat, server in self._servers.items()}
        for server in self._servers.values():
            poll.register(server.line, server.line.wishes)
        missing = len(lines) < len(self._seats)
        sending = any(server.line.unsent for server in self._servers.values())
        began = time.perf_counter()
        happened = poll.poll(1000 * CALL_AGAIN_S if missing else None)
        if not sending:
            self.waited_s += time.perf_counter() - began
        for fd, _ in happened:
            if fd in lines and lines[fd] in self._servers:
                self._attend(lines[fd])

    def _attend(self, seat: int) -> None:
        try:
            self._servers[seat].line.receive(self)
        except (RefusedError, PassedError):
            raise
        except LinkError:
            self._drop(seat)

    def _drop(self, seat: int) -> None:
        """What it owes is asked for again, of it or of another."""
        server = self._servers.pop(seat)
        self.bytes_sent += server.line.bytes_out
        server.line.close()
        for piece in self._pieces:
            if piece.primary == seat:
                self._open.pop(piece.index, None)
        self._told = False

    # ---- answers ----

    def place(self, line: Line, frame: Frame) -> Place:
        if frame.kind in (frames.STALE, frames.REFUSED, frames.STATUS, frames.ENTERED):
            if frame.size > frames.MOST_SAID_BYTES:
                raise LinkError(f"says {frame.size} bytes")
            return line.room(frame.size)
        piece = self._asked(frame)
        if piece is None or self._errand is None:
            return "skip"
        return self._errand.place(self._servers[line.peer], piece, frame)

    def _asked(self, frame: Frame) -> Piece | None:
        """The piece that this answers, if that is still wanted."""
        if (frame.table, frame.view) != (self._number, self._view) or frame.piece not in self._open:
            return None
        return self._pieces[frame.piece]

    def got(self, line: Line, frame: Frame) -> None:
        server = self._servers[line.peer]
        if frame.kind == frames.STALE:
            self._least = max(self._least, frame.table)
        elif frame.kind == frames.REFUSED:
            passed = self._entry is not None and frame.view > self._entry.view
            raise (PassedError if passed else RefusedError)(bytes(line.said).decode(errors="replace"))
        elif frame.kind == frames.STATUS:
            server.status = heard(line.said)
        elif frame.kind == frames.ENTERED:
            self._let_in(server, frame)
        elif (piece := self._asked(frame)) is not None and self._errand is not None:
            self._open[piece.index] = True
            if self._errand.answered(server, piece, frame):
                self._done[piece.first : piece.last] = [True] * (piece.last - piece.first)

    def _let_in(self, server: Server, frame: Frame) -> None:
        if server.line.same_host:
            server.memory = look_into(server.line.take_fd(), frame.number)
        if self._entry is not None and frame.view == self._entry.view:
            server.clocks = [int(clock) for clock in heard(server.line.said).get("clocks", [])]

    # ---- the end ----

    @property
    def far_bytes(self) -> int:
        """Of the stretch, what lies on servers that share no memory with us."""
        far = {seat for seat, server in self._servers.items() if not server.line.same_host}
        return sum(piece.stop - piece.start for piece in self._pieces if piece.primary in far)

    @property
    def sent_bytes(self) -> int:
        return self.bytes_sent + sum(server.line.bytes_out for server in self._servers.values())

    @property
    def moved_bytes(self) -> int:
        """Sent to and received from the servers that are connected now. From any thread."""
        return sum(server.line.bytes_in + server.line.bytes_out for server in list(self._servers.values()))

    def hang_up(self) -> None:
        """Whoever gave up waiting must not take a late answer for that to another question."""
        for seat in list(self._servers):
            self._drop(seat)

    def close(self) -> None:
        self.hang_up()
        self._bell.close()
