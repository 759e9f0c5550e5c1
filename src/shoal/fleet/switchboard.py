"""The thread behind `Control`: it owns the callers' sockets, and nobody else touches them."""

from __future__ import annotations

import itertools
import math
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shoal.fleet.listening import ListeningClock
from shoal.wire.bell import Bell
from shoal.wire.handshake import LinkError
from shoal.wire.rows import LanguageError, Outbox, Row, RowLink, pack

PING_S = 0.5
MOST_UNSENT_BYTES = 8 << 20
CLOSING_S = 1.0
_PING = pack("ping", {})
_OUR_WORDS = ("here", "lost")


@dataclass(eq=False)
class _Caller:
    number: int
    link: RowLink
    outbox: Outbox
    heard_at_s: float
    events: int = field(default=selectors.EVENT_READ)


class Switchboard:
    """`tell(number, row)` is called in the thread for whatever comes up: "here" first, "lost" last. While `full()`,
    callers are not read; they wait in their own memory. Methods without an underscore may be called by any thread;
    they return at once, and what they ask for happens in the order in which they were called."""

    def __init__(self, *, tell: Callable[[int, Row], None], full: Callable[[], bool]) -> None:
        self.garbled = 0
        self._tell = tell
        self._full = full
        self._numbers = itertools.count(1)
        self._callers: dict[int, _Caller] = {}
        self._orders: deque[Callable[[], object]] = deque()
        self._bell = Bell()
        self._everybody = selectors.DefaultSelector()
        self._everybody.register(self._bell, selectors.EVENT_READ)
        self._bell_alone = selectors.DefaultSelector()
        self._bell_alone.register(self._bell, selectors.EVENT_READ)
        self._clock = ListeningClock(2 * PING_S)
        self._closing_until = math.inf
        self._thread = threading.Thread(target=self._work, name="shoal-control", daemon=True)
        self._thread.start()

    def add(self, sock: socket.socket, hello: dict[str, Any], size_bytes: int) -> None:
        self._order(partial(self._add, sock, Row("here", hello, size_bytes)))

    def send(self, numbers: Iterable[int], row: bytes) -> None:
        self._order(partial(self._send, list(numbers), row))

    def drop(self, number: int) -> None:
        self._order(partial(self._forget, number))

    def look_again(self) -> None:
        """There is room again."""
        self._bell.ring()

    def heard_s(self, number: int) -> float:
        caller = self._callers.get(number)
        return math.inf if caller is None else self._clock.now_s - caller.heard_at_s

    def close(self) -> None:
        """What was sent before goes out, unless somebody does not read it in time."""
        self._order(self._say_goodbye)
        self._thread.join()
        self._bell.close()

    def _order(self, act: Callable[[], object]) -> None:
        self._orders.append(act)
        self._bell.ring()

    # Below is the thread's own.

    def _work(self) -> None:
        ping_at = time.monotonic()
        while not self._done():
            wake_at = self._closing_until if self._closing() else ping_at
            self._listen(max(0.0, wake_at - time.monotonic()))
            while self._orders:
                self._orders.popleft()()
            if time.monotonic() >= ping_at and not self._closing():
                ping_at = time.monotonic() + PING_S
                self._ping()
        for number in list(self._callers):
            self._forget(number)
        self._everybody.close()
        self._bell_alone.close()

    def _closing(self) -> bool:
        return self._closing_until < math.inf

    def _done(self) -> bool:
        return self._closing() and (not self._callers or time.monotonic() >= self._closing_until)

    def _listen(self, timeout_s: float) -> None:
        deaf = self._full() and not self._closing()
        ready = (self._bell_alone if deaf else self._everybody).select(timeout_s)
        if deaf:
            self._clock.skip()
        else:
            self._clock.look()
        for key, events in ready:
            if key.data is None:
                self._bell.clear()
            else:
                self._attend(key.data, events)

    def _attend(self, caller: _Caller, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._read(caller)
            if events & selectors.EVENT_WRITE:
                caller.link.write()
        except LanguageError as failure:
            self.garbled += 1
            self._lose(caller, str(failure))
        except LinkError as failure:
            self._lose(caller, str(failure))
        else:
            self._watch(caller)

    def _read(self, caller: _Caller) -> None:
        caller.heard_at_s = self._clock.now_s
        for row in caller.link.read():
            if row.kind in _OUR_WORDS:
                raise LanguageError(f"'{row.kind}' is not a caller's word")
            if not self._closing():
                self._tell(caller.number, row)

    def _watch(self, caller: _Caller) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if caller.link.waiting else 0)
        if events != caller.events:
            caller.events = events
            self._everybody.modify(caller.link, events, caller)

    def _add(self, sock: socket.socket, hello: Row) -> None:
        if self._closing():
            sock.close()
            return
        outbox = Outbox()
        caller = _Caller(next(self._numbers), RowLink(sock, outbox), outbox, self._clock.now_s)
        self._callers[caller.number] = caller
        self._everybody.register(caller.link, selectors.EVENT_READ, caller)
        self._tell(caller.number, hello)

    def _send(self, numbers: list[int], row: bytes) -> None:
        for caller in filter(None, map(self._callers.get, numbers)):
            caller.outbox.put(row)
            self._attend(caller, selectors.EVENT_WRITE)
            if caller.outbox.size_bytes > MOST_UNSENT_BYTES:
                self._lose(caller, "it does not read")

    def _ping(self) -> None:
        """To those for whom nothing else is on its way."""
        self._send([c.number for c in self._callers.values() if not c.link.waiting], _PING)

    def _lose(self, caller: _Caller, why: str) -> None:
        if self._forget(caller.number) and not self._closing():
            self._tell(caller.number, Row("lost", {"why": why}, len(why)))

    def _forget(self, number: int) -> bool:
        """Close it, if that has not been done."""
        caller = self._callers.pop(number, None)
        if caller is None:
            return False
        self._everybody.unregister(caller.link)
        caller.link.close()
        return True

    def _say_goodbye(self) -> None:
        self._closing_until = time.monotonic() + CLOSING_S
        for caller in list(self._callers.values()):
            try:
                caller.link.finish()
            except LinkError as failure:
                self._lose(caller, str(failure))
            else:
                self._watch(caller)
