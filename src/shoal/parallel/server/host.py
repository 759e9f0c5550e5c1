"""A server's one thread: it waits for sockets and lets the keeper do what comes."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from shoal.parallel.links.endpoint import Endpoint, reach
from shoal.parallel.server.keeper import Keeper, Terms
from shoal.parallel.server.line import Line
from shoal.spec.table import Table
from shoal.wire.bell import Bell
from shoal.wire.handshake import LinkError

CALL_AGAIN_S = 0.05
FRAMES_AT_ONCE = 4
"""Of one line, before the others have their turn and answers go out: a worker takes them while it still pushes."""


class Host:
    """`learn` and `stop` may be called by any thread; `filled(seat, table)` is called by the one that runs."""

    def __init__(
        self, seat: int, token: str, terms: Terms, *, bind: str, filled: Callable[[int, int], None] = lambda s, t: None
    ) -> None:
        self.keeper = Keeper(seat, terms, call=self._call, filled=filled, apart=self._do_apart)
        self._token = token
        self._bell = Bell()
        self._news: deque[Callable[[], None]] = deque()
        self._stopped = threading.Event()
        self._poll = select.poll()
        self._lines: dict[int, Line] = {}
        self.bytes_in = 0
        self.bytes_out = 0
        self.failures = 0
        self.endpoint = Endpoint(token, bind=bind, serve=self._serve, keeps=("push", "chain"))

    # ---- from other threads ----

    def learn(self, table: Table) -> None:
        self._soon(lambda: self._learn(table))

    def excuse(self, lanes: Iterable[int]) -> None:
        """Lanes that nobody waits for."""
        self._soon(lambda: self.keeper.excuse(lanes))

    def stop(self) -> None:
        self._stopped.set()
        self._bell.ring()

    def served(self) -> dict[str, float]:
        """What it has done so far."""
        lines, seen = list(self._lines.values()), self.keeper.orders.seen
        return {
            "pushes": seen.pushes,
            "repeats": seen.repeats,
            "records": seen.records,
            "bytes_in": self.bytes_in + sum(line.bytes_in for line in lines),
            "bytes_out": self.bytes_out + sum(line.bytes_out for line in lines),
            "staleness_mean": seen.stale / seen.records if seen.records else 0.0,
            "staleness_max": seen.stalest,
            "failures": self.failures,
            **self.keeper.desk.told(),
        }

    def _do_apart(self, act: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """In a thread of its own."""

        def work() -> None:
            try:
                result = act()
            except Exception as failure:
                result = failure
            self._soon(lambda: then(result))

        threading.Thread(target=work, name="shoal-apart", daemon=True).start()

    def _soon(self, act: Callable[[], None]) -> None:
        self._news.append(act)
        self._bell.ring()

    def _serve(self, sock: socket.socket, hello: dict[str, Any]) -> None:
        asks = hello["purpose"] == "push"
        line = Line(sock, hello["seat"], asks=asks)
        admit = self.keeper.welcome if asks else self.keeper.chain.admit

        def enter() -> None:
            for old in admit(line):
                self._drop(old)
            self._add(line)

        self._soon(enter)

    def _call(self, seat: int, table: Table) -> None:
        """In a thread of its own, for it may take a while, until it works or another table counts."""
        threading.Thread(target=self._reach, args=(seat, table), name="shoal-call", daemon=True).start()

    def _reach(self, seat: int, table: Table) -> None:
        me, number = self.keeper.seat, table.number
        while not self._stopped.is_set() and self.keeper.table is table:
            try:
                sock = reach(table.addresses[seat], self._token, purpose="chain", seat=me, view=number)
            except LinkError:
                self._stopped.wait(CALL_AGAIN_S)
            else:
                self._soon(partial(self._connected, seat, Line(sock, seat), number))
                return

    # ---- the one thread ----

    def run(self) -> None:
        """Until it is stopped."""
        self._poll.register(self._bell, select.POLLIN)
        while not self._stopped.is_set():
            for fd, events in self._poll.poll():
                if fd == self._bell.fileno():
                    self._bell.clear()
                    while self._news:
                        self._news.popleft()()
                elif (line := self._lines.get(fd)) is not None:
                    self._look_at(line, events)
            self.keeper.chain.pump()
            self._write()
        for line in self._lines.values():
            line.close()
        self.endpoint.close()

    def _look_at(self, line: Line, events: int) -> None:
        if not line.held:
            self._attend(line)
        elif events & ~select.POLLOUT:  # it waits for a table, so that only its end can have happened
            self._drop(line)

    def _attend(self, line: Line) -> None:
        try:
            line.receive(self.keeper, most=FRAMES_AT_ONCE)
        except LinkError:
            self._drop(line)
        except Exception:  # whatever somebody sends costs him his line, and nobody else anything
            if not self.failures:
                traceback.print_exc()
            self.failures += 1
            self._drop(line)

    def _write(self) -> None:
        """What answers there are, and what is wished for next."""
        for fd, line in list(self._lines.items()):
            try:
                line.flush()
                self._poll.modify(fd, line.wishes)
            except (LinkError, OSError, ValueError):
                self._drop(line)

    def _learn(self, table: Table) -> None:
        self.keeper.learn(table)
        for line in list(self._lines.values()):
            if line.fileno() < 0:
                self._forget(line)
            elif line.held:
                line.held = False
                self._attend(line)

    def _connected(self, seat: int, line: Line, table: int) -> None:
        if self.keeper.chain.connected(seat, line, table):
            self._add(line)
        else:
            line.close()

    def _add(self, line: Line) -> None:
        self._lines[line.fileno()] = line
        self._poll.register(line, line.wishes)

    def _drop(self, line: Line) -> None:
        self._forget(line)
        self.keeper.lost(line)
        line.close()

    def _forget(self, line: Line) -> None:
        for fd, one in list(self._lines.items()):
            if one is line:
                del self._lines[fd]
                with contextlib.suppress(KeyError, OSError):
                    self._poll.unregister(fd)
                self.bytes_in += line.bytes_in
                self.bytes_out += line.bytes_out
