"""A tunnel: a plain socket whose bytes go through TLS, carried by a thread.

Loops here poll many sockets and read into the place where the bytes belong; a TLS socket can do neither. So its bytes
are carried between it and one end of a socketpair, and everybody uses the other end. What ends one ends the other: a
half-close is a half-close there, and a connection that breaks is a closed one here, at once.
"""

from __future__ import annotations

import atexit
import contextlib
import select
import socket
import ssl
import threading
import time
from typing import Any

from shoal.wire.handshake import ALERT

CHUNK_BYTES = 1 << 18
LINGER_S = 10.0
"""How long what was said before a close may take to go out."""
SETTLE_S = 5.0
EXCUSE_S = 0.5
_RECORD_BYTES = 1 << 15
_ENDED = select.POLLHUP | select.POLLERR | select.POLLNVAL

_carriers: set[Carrier] = set()


class Tunnel(socket.socket):
    """The end that everybody uses. It passes for the connection itself: family, addresses and TCP's options are that
    connection's, and no descriptors can be sent through."""

    def __init__(self, end: socket.socket, outer: socket.socket, carrier: Carrier) -> None:
        super().__init__(fileno=end.detach())
        self._outer = outer
        self._carrier = carrier
        self._family = outer.family
        self._names = outer.getsockname(), outer.getpeername()

    @property
    def family(self) -> socket.AddressFamily:
        return self._family

    def getsockname(self) -> Any:
        return self._names[0]

    def getpeername(self) -> Any:
        return self._names[1]

    def setsockopt(self, level: int, *option: Any) -> None:
        if level != socket.IPPROTO_TCP:
            super().setsockopt(level, *option)
            return
        with contextlib.suppress(OSError):  # it may have ended, as whoever reads or writes will learn
            self._outer.setsockopt(level, *option)

    @property
    def trouble(self) -> str:
        return self._carrier.trouble


def dig(outer: socket.socket, context: ssl.SSLContext, *, answers: bool) -> Tunnel:
    """Owns the connection from now on. Who reads waits for the handshake, and finds a closed socket if that fails;
    `trouble` says why then. RuntimeError if there is no thread to be had."""
    inner, end = socket.socketpair()
    carrier = Carrier(outer, inner, context, answers=answers)
    try:
        tunnel = Tunnel(end, outer, carrier)
        threading.Thread(target=carrier.run, name="shoal-tls", daemon=True).start()
    except (OSError, RuntimeError):
        for sock in (outer, inner, end):
            sock.close()
        raise
    return tunnel


class Carrier:
    """Everything here is the thread's own, but `trouble` and `finish`. It holds two chunks of each direction at most:
    nothing is taken from one side before the other has taken what there was."""

    def __init__(self, outer: socket.socket, inner: socket.socket, context: ssl.SSLContext, *, answers: bool) -> None:
        self.trouble = ""
        outer.setblocking(False)
        inner.setblocking(False)
        self._outer, self._inner = outer, inner
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_side=answers)
        self._taken = memoryview(bytearray(CHUNK_BYTES))
        self._opened = memoryview(bytearray(CHUNK_BYTES + _RECORD_BYTES))  # with the rest of an earlier chunk
        self._clear = memoryview(b"")  # for the inner socket
        self._sealed = memoryview(b"")  # for the outer one
        self._agreed = False
        self._hears = True  # the other side may say more
        self._speaks = True  # the user may
        self._leaves_by: float | None = None  # the user has hung up
        self._all_said = threading.Event()

    def run(self) -> None:
        _carriers.add(self)
        try:
            self._agree()
            while not self._done():
                self._carry()
        except OSError as failure:  # ssl's own are such
            self.trouble = _explained(failure, agreed=self._agreed)
            if not self._agreed:
                self._excuse()
        finally:  # whatever happened, nobody waits any longer
            self._inner.close()
            self._outer.close()
            self._all_said.set()
            _carriers.discard(self)

    def finish(self, timeout_s: float) -> None:
        """From any thread: the user says no more. Waits until what was said has gone out."""
        with contextlib.suppress(OSError):
            self._inner.shutdown(socket.SHUT_RD)
        if self._agreed:
            self._all_said.wait(timeout_s)

    def _done(self) -> bool:
        if self._leaves_by is None:
            return self._all_said.is_set() and not self._hears and not self._clear
        return self._all_said.is_set() or not self._agreed or time.monotonic() >= self._leaves_by

    def _carry(self) -> None:
        outside, inside = self._wait()
        if inside & _ENDED and self._leaves_by is None:
            self._hang_up()
        if outside and self._wants_to_hear:
            self._hear()
        if inside and self._wants_to_take:
            self._take()
        self._give()
        self._send()

    @property
    def _wants_to_hear(self) -> bool:
        return self._hears and not self._clear and self._leaves_by is None

    @property
    def _wants_to_take(self) -> bool:
        return self._speaks and not self._sealed and self._agreed

    def _wait(self) -> tuple[int, int]:
        """What happened outside, and inside."""
        poll = select.poll()
        outside = (select.POLLIN if self._wants_to_hear else 0) | (select.POLLOUT if self._sealed else 0)
        if outside:
            poll.register(self._outer, outside)
        if self._leaves_by is None or self._wants_to_take:  # else its end would be told for ever
            inside = (select.POLLIN if self._wants_to_take else 0) | (select.POLLOUT if self._clear else 0)
            poll.register(self._inner, inside)
        left_s = None if self._leaves_by is None else max(0.0, self._leaves_by - time.monotonic())
        happened = dict(poll.poll(None if left_s is None else 1000 * left_s))
        return happened.get(self._outer.fileno(), 0), happened.get(self._inner.fileno(), 0)

    # ---- from the other side to the user ----

    def _hear(self) -> None:
        try:
            size = self._outer.recv_into(self._taken)
        except BlockingIOError:
            return
        if size:
            self._arrived.write(self._taken[:size])
        else:
            self._arrived.write_eof()  # without a goodbye it is no end that can be trusted: an error below
        if self._agreed or self._agree():
            self._open()

    def _agree(self) -> bool:
        """As much of the handshake as can be done now; is it over?"""
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
            self._agreed = True
        self._collect()
        self._send()
        return self._agreed

    def _open(self) -> None:
        """All that has arrived, so that a goodbye of ours never meets something unread, which TLS would not forgive."""
        size = 0
        try:
            while got := self._tls.read(CHUNK_BYTES, self._opened[size:]):
                size += int(got)
            self._hears = False
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:  # so it is told to one who has said goodbye himself
            self._hears = False
        self._clear = self._opened[:size]
        self._collect()

    def _give(self) -> None:
        try:
            if self._clear:
                self._clear = self._clear[self._inner.send(self._clear) :]
            if not self._clear and not self._hears:
                self._inner.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            self._hang_up()

    # ---- from the user to the other side ----

    def _take(self) -> None:
        try:
            size = self._inner.recv_into(self._taken)
        except BlockingIOError:
            return
        except ConnectionResetError:  # closed, with something unread
            size = 0
        if size:
            self._tls.write(self._taken[:size])
        else:
            self._speaks = False
            with contextlib.suppress(ssl.SSLError):  # it would wait for the other side's goodbye
                self._tls.unwrap()
        self._collect()

    def _collect(self) -> None:
        if self._leaving.pending:
            more = self._leaving.read()
            self._sealed = memoryview(bytes(self._sealed) + more if self._sealed else more)

    def _send(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if self._sealed:
                self._sealed = self._sealed[self._outer.send(self._sealed) :]
        if not self._sealed and not self._speaks and not self._all_said.is_set():
            self._outer.shutdown(socket.SHUT_WR)
            self._all_said.set()

    # ---- the end ----

    def _hang_up(self) -> None:
        self._leaves_by = self._leaves_by or time.monotonic() + LINGER_S
        self._clear = memoryview(b"")

    def _excuse(self) -> None:
        """Say why there is no agreement, and see that it is heard: a socket that is closed with something unread takes
        back what it had sent."""
        until = time.monotonic() + EXCUSE_S
        with contextlib.suppress(OSError):
            self._outer.settimeout(EXCUSE_S)
            self._outer.sendall(self._leaving.read() or ALERT)
            self._outer.shutdown(socket.SHUT_WR)
            while (left_s := until - time.monotonic()) > 0 and self._outer.recv_into(self._taken):
                self._outer.settimeout(left_s)


def _explained(failure: OSError, *, agreed: bool) -> str:
    """What the two do not agree on; nothing if the connection just broke."""
    reason = getattr(failure, "reason", None) or ""
    if isinstance(failure, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {failure.verify_message}"
    if reason == "TLSV1_ALERT_PROTOCOL_VERSION" or (not agreed and reason == "WRONG_VERSION_NUMBER"):
        return "it does not use TLS, and we do"
    if "ALERT" in reason:
        return f"it does not accept our certificate: {reason.partition('ALERT_')[2].replace('_', ' ').lower()}"
    return ""


def settle(timeout_s: float = SETTLE_S) -> None:
    """What was said goes out before the process ends, as the kernel would see to without TLS."""
    until = time.monotonic() + timeout_s
    for carrier in list(_carriers):
        carrier.finish(max(0.0, until - time.monotonic()))


atexit.register(settle)
