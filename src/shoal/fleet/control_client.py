"""The control channel of a worker, server or client: one thread that keeps a connection to the current driver.

It finds the driver, says hello, sends heartbeats, and receives views and chunk tables. When the driver is gone or
silent it looks for the next one; messages wait until then.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError

from shoal.errors import error
from shoal.fleet.driver_address import DriverAddress
from shoal.fleet.liveness_clock import LivenessClock
from shoal.net import handshake
from shoal.net.errors import LinkError, ProtocolError
from shoal.net.listener import connect_host
from shoal.net.messages import JsonMessage, MessageConnection, Outbox, encode_message
from shoal.net.tls import TlsContexts
from shoal.net.wakeup import Wakeup
from shoal.spec.chunk_table import ChunkTable
from shoal.spec.view import View

HEARTBEAT_INTERVAL_S = 0.25
DRIVER_HEARD_WITHIN_S = 1.5  # three pings of the driver
DRIVER_TIMEOUT_S = 5.0
MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 0.5
CLOSE_TIMEOUT_S = 2.0
MAX_UNSENT_BYTES = 8 << 20
_EMPTY_HEARTBEAT = encode_message("beat", {})

CallbackResult = TypeVar("CallbackResult")


class ControlClient:
    """At each connection attempt, `find_driver` returns the driver's present address and `hello` the first message.
    `heartbeat` returns the fields of a heartbeat, four times a second. All callbacks are called in the client's thread;
    their exceptions are printed and otherwise ignored.

    Only one thread at a time may call `wait`. Everything else may be called from any thread.
    """

    def __init__(
        self,
        find_driver: Callable[[], DriverAddress | None],
        hello: Callable[[], dict[str, Any]],
        *,
        heartbeat: Callable[[], dict[str, Any]],
        on_view: Callable[[View], None] | None = None,
        on_chunk_table: Callable[[ChunkTable], None] | None = None,
        on_welcome: Callable[[dict[str, Any]], None] | None = None,
        on_inspect: Callable[[dict[str, Any]], None] | None = None,
        tls_contexts: TlsContexts | None = None,
    ) -> None:
        self.dropped_messages = 0  # because too many waited for a driver
        self._find_driver = find_driver
        self._hello = hello
        self._heartbeat = heartbeat
        self._on_view = on_view
        self._on_chunk_table = on_chunk_table
        self._on_welcome = on_welcome
        self._on_inspect = on_inspect
        self._tls_contexts = tls_contexts
        self._changed = threading.Condition()
        self._view: View | None = None
        self._view_number = 0
        self._chunk_table: ChunkTable | None = None
        self._welcome: dict[str, Any] | None = None  # None without a driver
        self._stop_report: bytes | None = None  # set while a thread is in `wait`
        self._outbox = Outbox()
        self._wakeup = Wakeup()
        self._beat_now = False
        self._clock = LivenessClock(handshake.TIMEOUT_S + 1.0)
        self._last_heard_s = 0.0
        self._local_host = ""
        self._last_error = ""
        self._reported_errors: set[type] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-tie", daemon=True)

    def connect(self, timeout_s: float) -> dict[str, Any]:
        """Connect and return the driver's welcome. After SH610 the client keeps trying until it is closed."""
        if self._thread.ident is None:
            self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._welcome is not None, timeout_s)
            if self._welcome is not None:
                return self._welcome
        raise error(
            "SH610", f"no welcome from the driver in {timeout_s:g} s: {self._last_error or 'it does not answer'}"
        )

    def wait(
        self, seat: int, *, after: int, position: int | None, saved: bool = False, timeout_s: float | None = None
    ) -> View | None:
        """See Membership. Also returns None when the client is closed. Each new driver gets the position again."""
        standing = encode_message("standing", {"view": after, "position": position, "saved": saved})
        with self._changed:
            self._stop_report = standing
            if self._welcome is not None:
                self._enqueue(standing)
                self._wakeup.notify()
            try:
                self._changed.wait_for(lambda: self._closing.is_set() or self._has_view_for(seat, after), timeout_s)
                return self._view if self._has_view_for(seat, after) else None
            finally:
                self._stop_report = None

    def newer(self, number: int) -> bool:
        return self._view_number > number

    @property
    def view(self) -> View | None:
        """The newest view received."""
        return self._view

    @property
    def chunk_table(self) -> ChunkTable | None:
        """The newest chunk table received."""
        return self._chunk_table

    def wait_chunk_table(self, after: int, timeout_s: float | None = None) -> ChunkTable | None:
        """The newest table, once its number is above `after`; None after the timeout or when the client is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing.is_set() or self._chunk_table_number > after, timeout_s)
            return self._chunk_table if self._chunk_table_number > after else None

    def send(self, kind: str, **fields: Any) -> None:
        """Queue a message. Without a driver messages wait, and the oldest are dropped if there are too many. ValueError
        if the message is too long."""
        self._enqueue(encode_message(kind, fields))
        self._wakeup.notify()

    def beat(self) -> None:
        """Send a heartbeat now. The driver then reads the events at once, not only when its next tick is due."""
        self._beat_now = True
        self._wakeup.notify()

    @property
    def driver_silence_s(self) -> float:
        """0.0 while the driver is heard, else the seconds since it was last heard. Time in which this process did not
        listen does not count."""
        silent_s = self._clock.now_s - self._last_heard_s
        return 0.0 if self._welcome is not None and silent_s < DRIVER_HEARD_WITHIN_S else silent_s

    @property
    def local_address(self) -> str:
        """This host's address on the connection to the driver; peers can probably reach it."""
        return self._local_host

    def close(self) -> None:
        """Send the queued messages if the driver reads them in time, then disconnect."""
        self._closing.set()
        self._wakeup.notify()
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S + 1.0)
        elif self._thread.ident is None:
            self._wakeup.close()

    def _enqueue(self, message: bytes) -> None:
        self._outbox.put(message)
        self.dropped_messages += self._outbox.drop_oldest(MAX_UNSENT_BYTES)

    @property
    def _chunk_table_number(self) -> int:
        return self._chunk_table.number if self._chunk_table is not None else 0

    def _has_view_for(self, seat: int, after: int) -> bool:
        return self._view is not None and self._view.number > after and self._view.concerns(seat)

    # ---- the thread ----

    def _run(self) -> None:
        pause_s = MIN_BACKOFF_S
        while not self._closing.is_set():
            try:
                self._run_connection()
            except LinkError as failure:
                self._last_error = str(failure)
            except Exception as failure:  # raised by `find_driver` or `hello`: try again
                self._last_error = f"{type(failure).__name__}: {failure}"
                self._report_once(failure)
            pause_s = MIN_BACKOFF_S if self._welcome is not None else min(2 * pause_s, MAX_BACKOFF_S)
            self._welcome = None
            self._clock.tick()
            self._closing.wait(pause_s)
        self._wakeup.close()

    def _run_connection(self) -> None:
        """Run one connection until it is lost (LinkError), or the client is closed and everything is sent."""
        contact = self._find_driver()
        if contact is None:
            raise LinkError("the driver's address is not written yet, or cannot be used")
        hello = json.dumps(self._hello(), default=str).encode()
        sock = connect_host(contact.host, contact.port, contact.token, hello, tls_contexts=self._tls_contexts)
        with contextlib.closing(MessageConnection(sock, self._outbox)) as link, selectors.DefaultSelector() as selector:
            self._outbox.rewind()
            self._local_host = link.local_host
            self._clock.tick()
            self._last_heard_s = self._clock.now_s
            selector.register(self._wakeup, selectors.EVENT_READ)
            selector.register(link, selectors.EVENT_READ)
            self._exchange_messages(link, selector)

    def _exchange_messages(self, link: MessageConnection, selector: selectors.BaseSelector) -> None:
        beat_at = time.monotonic()
        while not self._closing.is_set():
            self._read_messages(link)
            if self._beat_now or time.monotonic() >= beat_at:
                self._beat_now = False
                beat_at = time.monotonic() + HEARTBEAT_INTERVAL_S
                if self._welcome is not None:
                    self._enqueue(
                        self._run_callback(lambda: encode_message("beat", self._heartbeat())) or _EMPTY_HEARTBEAT
                    )
            if self._welcome is not None:  # before its welcome the driver does not know this process
                link.write()
            wants = selectors.EVENT_WRITE if self._welcome is not None and link.has_unsent else 0
            selector.modify(link, selectors.EVENT_READ | wants)
            selector.select(max(0.0, beat_at - time.monotonic()))
            self._wakeup.clear()
        if self._welcome is not None:
            self._flush_and_disconnect(link)

    def _read_messages(self, link: MessageConnection) -> None:
        self._clock.tick()
        for row in link.read():
            self._handle(row)
        if self._clock.now_s - self._last_heard_s > DRIVER_TIMEOUT_S:
            raise LinkError("the driver is silent")

    def _handle(self, message: JsonMessage) -> None:
        self._last_heard_s = self._clock.now_s
        if message.kind == "welcome":
            self._handle_welcome(message.fields)
        elif message.kind == "view":
            self._handle_view(message.fields.get("view"))
        elif message.kind == "table":
            self._handle_chunk_table(message.fields.get("table"))
        elif message.kind == "inspect" and self._on_inspect is not None:
            self._run_callback(partial(self._on_inspect, message.fields))

    def _handle_welcome(self, fields: dict[str, Any]) -> None:
        if self._on_welcome is not None:
            self._run_callback(partial(self._on_welcome, fields))
        with self._changed:
            self._welcome = fields
            if self._stop_report is not None:
                self._enqueue(self._stop_report)
            self._changed.notify_all()

    def _handle_view(self, payload: object) -> None:
        try:
            view = View.model_validate(payload)
        except ValidationError as failure:
            raise ProtocolError(f"the driver sent a view that is not valid: {failure}") from failure
        if view.number <= self._view_number:
            return
        with self._changed:
            self._view, self._view_number = view, view.number
            self._changed.notify_all()
        if self._on_view is not None:
            self._run_callback(partial(self._on_view, view))

    def _handle_chunk_table(self, payload: object) -> None:
        try:
            table = ChunkTable.model_validate(payload)
        except ValidationError as failure:
            raise ProtocolError(f"the driver sent a chunk table that is not valid: {failure}") from failure
        if table.number <= self._chunk_table_number:
            return
        with self._changed:
            self._chunk_table = table
            self._changed.notify_all()
        if self._on_chunk_table is not None:
            self._run_callback(partial(self._on_chunk_table, table))

    def _flush_and_disconnect(self, link: MessageConnection) -> None:
        """Send the queued messages, then wait until the driver has read them and closes its end (LinkError)."""
        until = time.monotonic() + CLOSE_TIMEOUT_S
        link.finish_sending()
        with selectors.DefaultSelector() as selector:
            selector.register(link, selectors.EVENT_READ)
            while time.monotonic() < until:
                for _ in link.read():
                    pass
                if link.has_unsent:
                    link.write()
                selector.modify(link, selectors.EVENT_READ | (selectors.EVENT_WRITE if link.has_unsent else 0))
                selector.select(max(0.0, until - time.monotonic()))

    def _run_callback(self, callback: Callable[[], CallbackResult]) -> CallbackResult | None:
        try:
            return callback()
        except Exception as failure:
            self._report_once(failure)
            return None

    def _report_once(self, failure: Exception) -> None:
        """Print the traceback to the process's log, once for each exception type: callbacks run four times a second."""
        if type(failure) not in self._reported_errors:
            self._reported_errors.add(type(failure))
            traceback.print_exception(failure)
