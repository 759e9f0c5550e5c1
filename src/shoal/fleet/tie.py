"""The worker's or server's end of the control channel: one thread that keeps a connection to whoever drives now.

It finds the driver, greets it, tells that this process lives, and takes views and tables in. When the driver is gone
or silent it looks for the next one; what was said meanwhile waits.
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
from shoal.fleet.contact import Contact
from shoal.fleet.listening import ListeningClock
from shoal.spec.table import Table
from shoal.spec.view import View
from shoal.wire import handshake
from shoal.wire.bell import Bell
from shoal.wire.door import call_host
from shoal.wire.handshake import LinkError
from shoal.wire.rows import LanguageError, Outbox, Row, RowLink, pack

BEAT_S = 0.25
HEARD_S = 1.5  # three pings of the driver
SILENT_S = 5.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 0.5
CLOSING_S = 2.0
MOST_UNSENT_BYTES = 8 << 20
_BARE_BEAT = pack("beat", {})

Answer = TypeVar("Answer")


class Tie:
    """`find` gives the driver's contact as it is now and `hello` who we are, at each attempt; `beat` what to tell four
    times a second. All callbacks are called in the tie's thread; what they raise is printed and ends nothing.

    `wait` is for one thread at a time; everything else may be called by any.
    """

    def __init__(
        self,
        find: Callable[[], Contact | None],
        hello: Callable[[], dict[str, Any]],
        *,
        beat: Callable[[], dict[str, Any]],
        on_view: Callable[[View], None] | None = None,
        on_table: Callable[[Table], None] | None = None,
        on_welcome: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.dropped = 0  # rows that waited for a driver for too long
        self._find = find
        self._hello = hello
        self._beat = beat
        self._on_view = on_view
        self._on_table = on_table
        self._on_welcome = on_welcome
        self._changed = threading.Condition()
        self._view: View | None = None
        self._number = 0
        self._table: Table | None = None
        self._welcome: dict[str, Any] | None = None  # None while there is no driver
        self._standing: bytes | None = None  # while somebody waits
        self._outbox = Outbox()
        self._bell = Bell()
        self._clock = ListeningClock(handshake.TIMEOUT_S + 1.0)
        self._heard_at_s = 0.0
        self._local_host = ""
        self._trouble = ""
        self._complained: set[type] = set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="shoal-tie", daemon=True)

    def connect(self, timeout_s: float) -> dict[str, Any]:
        """The driver's welcome. After a failure the tie goes on trying until it is closed."""
        if self._thread.ident is None:
            self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._welcome is not None, timeout_s)
            if self._welcome is not None:
                return self._welcome
        raise error("SH610", f"no welcome from the driver in {timeout_s:g} s: {self._trouble or 'it does not answer'}")

    def wait(
        self, seat: int, *, after: int, position: int | None, saved: bool = False, timeout_s: float | None = None
    ) -> View | None:
        """See Membership. Also None when the tie is closed. The standing is told again to each new driver."""
        standing = pack("standing", {"view": after, "position": position, "saved": saved})
        with self._changed:
            self._standing = standing
            if self._welcome is not None:
                self._put(standing)
                self._bell.ring()
            try:
                self._changed.wait_for(lambda: self._closing.is_set() or self._is_for(seat, after), timeout_s)
                return self._view if self._is_for(seat, after) else None
            finally:
                self._standing = None

    def newer(self, number: int) -> bool:
        return self._number > number

    @property
    def view(self) -> View | None:
        """The newest that was seen."""
        return self._view

    @property
    def table(self) -> Table | None:
        """The newest that was seen: which servers hold what."""
        return self._table

    def wait_table(self, after: int, timeout_s: float | None = None) -> Table | None:
        """The newest table, once it is newer than `after`; None if there is none in time, or the tie is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing.is_set() or self._table_number > after, timeout_s)
            return self._table if self._table_number > after else None

    def say(self, kind: str, **fields: Any) -> None:
        """While there is no driver, rows wait; when there are too many, the oldest are dropped. ValueError if the row
        is longer than a row may be."""
        self._put(pack(kind, fields))
        self._bell.ring()

    @property
    def alone_s(self) -> float:
        """0.0 while the driver is heard, else for how long it was not, counting only time in which we listened."""
        silent_s = self._clock.now_s - self._heard_at_s
        return 0.0 if self._welcome is not None and silent_s < HEARD_S else silent_s

    @property
    def address_seen(self) -> str:
        """Our address on the way to the driver; peers can probably reach us there."""
        return self._local_host

    def close(self) -> None:
        """What was said goes out first if the driver takes it in time."""
        self._closing.set()
        self._bell.ring()
        with self._changed:
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(CLOSING_S + 1.0)
        elif self._thread.ident is None:
            self._bell.close()

    def _put(self, row: bytes) -> None:
        self._outbox.put(row)
        self.dropped += self._outbox.shorten(MOST_UNSENT_BYTES)

    @property
    def _table_number(self) -> int:
        return self._table.number if self._table is not None else 0

    def _is_for(self, seat: int, after: int) -> bool:
        return self._view is not None and self._view.number > after and self._view.concerns(seat)

    # Below is the thread's own.

    def _work(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closing.is_set():
            try:
                self._stay_connected()
            except LinkError as failure:
                self._trouble = str(failure)
            except Exception as failure:  # of `find` or `hello`: they may do better next time
                self._trouble = f"{type(failure).__name__}: {failure}"
                self._complain(failure)
            pause_s = FIRST_PAUSE_S if self._welcome is not None else min(2 * pause_s, LONGEST_PAUSE_S)
            self._welcome = None
            self._clock.look()
            self._closing.wait(pause_s)
        self._bell.close()

    def _stay_connected(self) -> None:
        """Until the connection is lost (LinkError), or the tie is closed and everything is said."""
        contact = self._find()
        if contact is None:
            raise LinkError("nobody has left a contact yet")
        hello = json.dumps(self._hello(), default=str).encode()
        sock = call_host(contact.host, contact.port, contact.token, hello)
        with contextlib.closing(RowLink(sock, self._outbox)) as link, selectors.DefaultSelector() as selector:
            self._outbox.start_over()
            self._local_host = link.local_host
            self._clock.look()
            self._heard_at_s = self._clock.now_s
            selector.register(self._bell, selectors.EVENT_READ)
            selector.register(link, selectors.EVENT_READ)
            self._talk(link, selector)

    def _talk(self, link: RowLink, selector: selectors.BaseSelector) -> None:
        beat_at = time.monotonic()
        while not self._closing.is_set():
            self._listen(link)
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + BEAT_S
                if self._welcome is not None:
                    self._put(self._ask(lambda: pack("beat", self._beat())) or _BARE_BEAT)
            if self._welcome is not None:  # a driver that did not welcome us does not know yet whom it hears
                link.write()
            wants = selectors.EVENT_WRITE if self._welcome is not None and link.waiting else 0
            selector.modify(link, selectors.EVENT_READ | wants)
            selector.select(max(0.0, beat_at - time.monotonic()))
            self._bell.clear()
        if self._welcome is not None:
            self._part(link)

    def _listen(self, link: RowLink) -> None:
        self._clock.look()
        for row in link.read():
            self._hear(row)
        if self._clock.now_s - self._heard_at_s > SILENT_S:
            raise LinkError("the driver is silent")

    def _hear(self, row: Row) -> None:
        self._heard_at_s = self._clock.now_s
        if row.kind == "welcome":
            self._be_welcomed(row.fields)
        elif row.kind == "view":
            self._see(row.fields.get("view"))
        elif row.kind == "table":
            self._lay(row.fields.get("table"))

    def _be_welcomed(self, fields: dict[str, Any]) -> None:
        if self._on_welcome is not None:
            self._ask(partial(self._on_welcome, fields))
        with self._changed:
            self._welcome = fields
            if self._standing is not None:
                self._put(self._standing)
            self._changed.notify_all()

    def _see(self, sent: object) -> None:
        try:
            view = View.model_validate(sent)
        except ValidationError as failure:
            raise LanguageError(f"a view that is none: {failure}") from failure
        if view.number <= self._number:
            return
        with self._changed:
            self._view, self._number = view, view.number
            self._changed.notify_all()
        if self._on_view is not None:
            self._ask(partial(self._on_view, view))

    def _lay(self, sent: object) -> None:
        try:
            table = Table.model_validate(sent)
        except ValidationError as failure:
            raise LanguageError(f"a table that is none: {failure}") from failure
        if table.number <= self._table_number:
            return
        with self._changed:
            self._table = table
            self._changed.notify_all()
        if self._on_table is not None:
            self._ask(partial(self._on_table, table))

    def _part(self, link: RowLink) -> None:
        """Say what is left, and stay until the driver closes its end (LinkError): then it has heard all of it."""
        until = time.monotonic() + CLOSING_S
        link.finish()
        with selectors.DefaultSelector() as selector:
            selector.register(link, selectors.EVENT_READ)
            while time.monotonic() < until:
                for _ in link.read():
                    pass
                if link.waiting:
                    link.write()
                selector.modify(link, selectors.EVENT_READ | (selectors.EVENT_WRITE if link.waiting else 0))
                selector.select(max(0.0, until - time.monotonic()))

    def _ask(self, callback: Callable[[], Answer]) -> Answer | None:
        try:
            return callback()
        except Exception as failure:
            self._complain(failure)
            return None

    def _complain(self, failure: Exception) -> None:
        """In the worker's log, once for each kind: a callback is called four times a second."""
        if type(failure) not in self._complained:
            self._complained.add(type(failure))
            traceback.print_exception(failure)
