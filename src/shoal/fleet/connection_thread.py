"""The thread behind `ControlServer`. It owns the sockets of all connections; no other thread touches them."""

from __future__ import annotations

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

from shoal.fleet.liveness_clock import LivenessClock
from shoal.net.errors import LinkError, ProtocolError
from shoal.net.messages import JsonMessage, MessageConnection, Outbox, encode_message
from shoal.net.wakeup import Wakeup

PING_INTERVAL_S = 0.5
MAX_UNSENT_BYTES = 8 << 20
CLOSE_TIMEOUT_S = 1.0
_PING = encode_message("ping", {})
_RESERVED_KINDS = ("here", "lost")


@dataclass(eq=False)
class _ControlConnection:
    number: int
    link: MessageConnection
    outbox: Outbox
    last_heard_s: float
    events: int = field(default=selectors.EVENT_READ)


class ConnectionThread:
    """Calls `on_message(number, message)` in its own thread: "here" first, "lost" last, with the field `refused` if the
    peer broke the protocol. While `inbox_full()`, nothing is read, and unread messages stay with their senders. Public
    methods may be called from any thread; they return at once and take effect in the order of the calls."""

    def __init__(self, *, on_message: Callable[[int, JsonMessage], None], inbox_full: Callable[[], bool]) -> None:
        self._on_message = on_message
        self._inbox_full = inbox_full
        self._connections: dict[int, _ControlConnection] = {}
        self._pending_calls: deque[Callable[[], object]] = deque()
        self._wakeup = Wakeup()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        self._wakeup_selector = selectors.DefaultSelector()
        self._wakeup_selector.register(self._wakeup, selectors.EVENT_READ)
        self._clock = LivenessClock(2 * PING_INTERVAL_S)
        self._closing_until = math.inf
        self._thread = threading.Thread(target=self._run, name="shoal-control", daemon=True)
        self._thread.start()

    def add(self, number: int, sock: socket.socket, hello: dict[str, Any], size_bytes: int) -> None:
        self._call_soon(partial(self._add, number, sock, JsonMessage("here", hello, size_bytes)))

    def send(self, numbers: Iterable[int], message: bytes) -> None:
        self._call_soon(partial(self._send, list(numbers), message))

    def drop(self, number: int) -> None:
        self._call_soon(partial(self._close_connection, number))

    def resume_reading(self) -> None:
        """Read again after `inbox_full()` has become false."""
        self._wakeup.notify()

    def silence_s(self, number: int) -> float:
        caller = self._connections.get(number)
        return math.inf if caller is None else self._clock.now_s - caller.last_heard_s

    def close(self) -> None:
        """Send the queued messages, then close all connections. A peer that does not read in time misses the rest."""
        self._call_soon(self._begin_closing)
        self._thread.join()
        self._wakeup.close()

    def _call_soon(self, call: Callable[[], object]) -> None:
        self._pending_calls.append(call)
        self._wakeup.notify()

    # ---- the thread ----

    def _run(self) -> None:
        ping_at = time.monotonic()
        while not self._done():
            wake_at = self._closing_until if self._closing() else ping_at
            self._select(max(0.0, wake_at - time.monotonic()))
            while self._pending_calls:
                self._pending_calls.popleft()()
            if time.monotonic() >= ping_at and not self._closing():
                ping_at = time.monotonic() + PING_INTERVAL_S
                self._ping()
        for number in list(self._connections):
            self._close_connection(number)
        self._selector.close()
        self._wakeup_selector.close()

    def _closing(self) -> bool:
        return self._closing_until < math.inf

    def _done(self) -> bool:
        return self._closing() and (not self._connections or time.monotonic() >= self._closing_until)

    def _select(self, timeout_s: float) -> None:
        deaf = self._inbox_full() and not self._closing()
        ready = (self._wakeup_selector if deaf else self._selector).select(timeout_s)
        if deaf:
            self._clock.skip()
        else:
            self._clock.tick()
        for key, events in ready:
            if key.data is None:
                self._wakeup.clear()
            else:
                self._handle_ready(key.data, events)

    def _handle_ready(self, connection: _ControlConnection, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._read(connection)
            if events & selectors.EVENT_WRITE:
                connection.link.write()
        except ProtocolError as failure:
            self._report_lost(connection, str(failure), refused=True)
        except LinkError as failure:
            self._report_lost(connection, str(failure))
        else:
            self._update_interest(connection)

    def _read(self, connection: _ControlConnection) -> None:
        connection.last_heard_s = self._clock.now_s
        for row in connection.link.read():
            if row.kind in _RESERVED_KINDS:
                raise ProtocolError(f"'{row.kind}' is not a caller's word")
            if not self._closing():
                self._on_message(connection.number, row)

    def _update_interest(self, connection: _ControlConnection) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.link.has_unsent else 0)
        if events != connection.events:
            connection.events = events
            self._selector.modify(connection.link, events, connection)

    def _add(self, number: int, sock: socket.socket, hello: JsonMessage) -> None:
        if self._closing():
            sock.close()
            return
        outbox = Outbox()
        caller = _ControlConnection(number, MessageConnection(sock, outbox), outbox, self._clock.now_s)
        self._connections[caller.number] = caller
        self._selector.register(caller.link, selectors.EVENT_READ, caller)
        self._on_message(caller.number, hello)

    def _send(self, numbers: list[int], message: bytes) -> None:
        for caller in filter(None, map(self._connections.get, numbers)):
            caller.outbox.put(message)
            self._handle_ready(caller, selectors.EVENT_WRITE)
            if caller.outbox.size_bytes > MAX_UNSENT_BYTES:
                self._report_lost(caller, "it does not read")

    def _ping(self) -> None:
        """Ping the connections that have nothing else to send."""
        self._send([c.number for c in self._connections.values() if not c.link.has_unsent], _PING)

    def _report_lost(self, connection: _ControlConnection, why: str, *, refused: bool = False) -> None:
        if self._close_connection(connection.number) and not self._closing():
            self._on_message(connection.number, JsonMessage("lost", {"why": why, "refused": refused}, len(why)))

    def _close_connection(self, number: int) -> bool:
        """Close a connection. Returns False if it was already closed."""
        caller = self._connections.pop(number, None)
        if caller is None:
            return False
        self._selector.unregister(caller.link)
        caller.link.close()
        return True

    def _begin_closing(self) -> None:
        self._closing_until = time.monotonic() + CLOSE_TIMEOUT_S
        for caller in list(self._connections.values()):
            try:
                caller.link.finish_sending()
            except LinkError as failure:
                self._report_lost(caller, str(failure))
            else:
                self._update_interest(caller)
