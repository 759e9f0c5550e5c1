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

from shoal.net.handshake import TLS_ALERT

CHUNK_BYTES = 1 << 18
LINGER_S = 10.0
"""How long what was said before a close may take to go out."""
EXIT_FLUSH_S = 5.0
ALERT_DRAIN_S = 0.5
_RECORD_BYTES = 1 << 15
_ENDED = select.POLLHUP | select.POLLERR | select.POLLNVAL

_pumps: set[TlsPump] = set()


class TlsSocket(socket.socket):
    """The end that everybody uses. It passes for the connection itself: family, addresses and TCP's options are that
    connection's, and no descriptors can be sent through."""

    def __init__(self, end: socket.socket, outer: socket.socket, pump: TlsPump) -> None:
        super().__init__(fileno=end.detach())
        self._outer = outer
        self._pump = pump
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
    def failure_reason(self) -> str:
        return self._pump.failure_reason


def wrap(outer: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> TlsSocket:
    """Owns the connection from now on. Who reads waits for the handshake, and finds a closed socket if that fails;
    `trouble` says why then. RuntimeError if there is no thread to be had."""
    inner, end = socket.socketpair()
    carrier = TlsPump(outer, inner, context, server_side=server_side)
    try:
        tunnel = TlsSocket(end, outer, carrier)
        threading.Thread(target=carrier.run, name="shoal-tls", daemon=True).start()
    except (OSError, RuntimeError):
        for sock in (outer, inner, end):
            sock.close()
        raise
    return tunnel


class TlsPump:
    """Everything here is the thread's own, but `trouble` and `finish`. It holds two chunks of each direction at most:
    nothing is taken from one side before the other has taken what there was."""

    def __init__(
        self, outer: socket.socket, inner: socket.socket, context: ssl.SSLContext, *, server_side: bool
    ) -> None:
        self.failure_reason = ""
        outer.setblocking(False)
        inner.setblocking(False)
        self._outer, self._inner = outer, inner
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._read_buffer = memoryview(bytearray(CHUNK_BYTES))
        self._decrypt_buffer = memoryview(bytearray(CHUNK_BYTES + _RECORD_BYTES))  # with the rest of an earlier chunk
        self._plaintext = memoryview(b"")  # for the inner socket
        self._ciphertext = memoryview(b"")  # for the outer one
        self._handshake_done = False
        self._peer_open = True  # the other side may say more
        self._user_open = True  # the user may
        self._linger_deadline_s: float | None = None  # the user has hung up
        self._flushed = threading.Event()

    def run(self) -> None:
        _pumps.add(self)
        try:
            self._advance_handshake()
            while not self._done():
                self._pump_once()
        except OSError as failure:  # ssl's own are such
            self.failure_reason = _explain(failure, handshake_done=self._handshake_done)
            if not self._handshake_done:
                self._send_alert()
        finally:  # whatever happened, nobody waits any longer
            self._inner.close()
            self._outer.close()
            self._flushed.set()
            _pumps.discard(self)

    def flush(self, timeout_s: float) -> None:
        """From any thread: the user says no more. Waits until what was said has gone out."""
        with contextlib.suppress(OSError):
            self._inner.shutdown(socket.SHUT_RD)
        if self._handshake_done:
            self._flushed.wait(timeout_s)

    def _done(self) -> bool:
        if self._linger_deadline_s is None:
            return self._flushed.is_set() and not self._peer_open and not self._plaintext
        return self._flushed.is_set() or not self._handshake_done or time.monotonic() >= self._linger_deadline_s

    def _pump_once(self) -> None:
        outside, inside = self._wait()
        if inside & _ENDED and self._linger_deadline_s is None:
            self._start_linger()
        if outside and self._wants_peer_data:
            self._read_peer()
        if inside and self._wants_user_data:
            self._read_user()
        self._write_user()
        self._write_peer()

    @property
    def _wants_peer_data(self) -> bool:
        return self._peer_open and not self._plaintext and self._linger_deadline_s is None

    @property
    def _wants_user_data(self) -> bool:
        return self._user_open and not self._ciphertext and self._handshake_done

    def _wait(self) -> tuple[int, int]:
        """What happened outside, and inside."""
        poll = select.poll()
        outside = (select.POLLIN if self._wants_peer_data else 0) | (select.POLLOUT if self._ciphertext else 0)
        if outside:
            poll.register(self._outer, outside)
        if self._linger_deadline_s is None or self._wants_user_data:  # else its end would be told for ever
            inside = (select.POLLIN if self._wants_user_data else 0) | (select.POLLOUT if self._plaintext else 0)
            poll.register(self._inner, inside)
        left_s = None if self._linger_deadline_s is None else max(0.0, self._linger_deadline_s - time.monotonic())
        happened = dict(poll.poll(None if left_s is None else 1000 * left_s))
        return happened.get(self._outer.fileno(), 0), happened.get(self._inner.fileno(), 0)

    # ---- from the other side to the user ----

    def _read_peer(self) -> None:
        try:
            size = self._outer.recv_into(self._read_buffer)
        except BlockingIOError:
            return
        if size:
            self._incoming.write(self._read_buffer[:size])
        else:
            self._incoming.write_eof()  # without a goodbye it is no end that can be trusted: an error below
        if self._handshake_done or self._advance_handshake():
            self._decrypt()

    def _advance_handshake(self) -> bool:
        """As much of the handshake as can be done now; is it over?"""
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
            self._handshake_done = True
        self._collect_ciphertext()
        self._write_peer()
        return self._handshake_done

    def _decrypt(self) -> None:
        """All that has arrived, so that a goodbye of ours never meets something unread, which TLS would not forgive."""
        size = 0
        try:
            while got := self._tls.read(CHUNK_BYTES, self._decrypt_buffer[size:]):
                size += int(got)
            self._peer_open = False
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:  # so it is told to one who has said goodbye himself
            self._peer_open = False
        self._plaintext = self._decrypt_buffer[:size]
        self._collect_ciphertext()

    def _write_user(self) -> None:
        try:
            if self._plaintext:
                self._plaintext = self._plaintext[self._inner.send(self._plaintext) :]
            if not self._plaintext and not self._peer_open:
                self._inner.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            self._start_linger()

    # ---- from the user to the other side ----

    def _read_user(self) -> None:
        try:
            size = self._inner.recv_into(self._read_buffer)
        except BlockingIOError:
            return
        except ConnectionResetError:  # closed, with something unread
            size = 0
        if size:
            self._tls.write(self._read_buffer[:size])
        else:
            self._user_open = False
            with contextlib.suppress(ssl.SSLError):  # it would wait for the other side's goodbye
                self._tls.unwrap()
        self._collect_ciphertext()

    def _collect_ciphertext(self) -> None:
        if self._outgoing.pending:
            more = self._outgoing.read()
            self._ciphertext = memoryview(bytes(self._ciphertext) + more if self._ciphertext else more)

    def _write_peer(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if self._ciphertext:
                self._ciphertext = self._ciphertext[self._outer.send(self._ciphertext) :]
        if not self._ciphertext and not self._user_open and not self._flushed.is_set():
            self._outer.shutdown(socket.SHUT_WR)
            self._flushed.set()

    # ---- the end ----

    def _start_linger(self) -> None:
        self._linger_deadline_s = self._linger_deadline_s or time.monotonic() + LINGER_S
        self._plaintext = memoryview(b"")

    def _send_alert(self) -> None:
        """Say why there is no agreement, and see that it is heard: a socket that is closed with something unread takes
        back what it had sent."""
        until = time.monotonic() + ALERT_DRAIN_S
        with contextlib.suppress(OSError):
            self._outer.settimeout(ALERT_DRAIN_S)
            self._outer.sendall(self._outgoing.read() or TLS_ALERT)
            self._outer.shutdown(socket.SHUT_WR)
            while (left_s := until - time.monotonic()) > 0 and self._outer.recv_into(self._read_buffer):
                self._outer.settimeout(left_s)


def _explain(failure: OSError, *, handshake_done: bool) -> str:
    """What the two do not agree on; nothing if the connection just broke."""
    reason = getattr(failure, "reason", None) or ""
    if isinstance(failure, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {failure.verify_message}"
    if reason == "TLSV1_ALERT_PROTOCOL_VERSION" or (not handshake_done and reason == "WRONG_VERSION_NUMBER"):
        return "it does not use TLS, and we do"
    if "ALERT" in reason:
        return f"it does not accept our certificate: {reason.partition('ALERT_')[2].replace('_', ' ').lower()}"
    return ""


def flush_all(timeout_s: float = EXIT_FLUSH_S) -> None:
    """What was said goes out before the process ends, as the kernel would see to without TLS."""
    until = time.monotonic() + timeout_s
    for carrier in list(_pumps):
        carrier.flush(max(0.0, until - time.monotonic()))


atexit.register(flush_all)
