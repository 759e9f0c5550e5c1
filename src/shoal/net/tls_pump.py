"""A plain socket whose bytes go through TLS, copied by a thread.

Shoal's loops poll many sockets and read directly into their buffers; a TLS socket supports neither. So a thread copies
bytes between the TLS connection and one end of a socketpair, and the program uses the other end. A half-close on one
side becomes a half-close on the other, and a broken connection becomes a closed socket at once.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import select
import socket
import ssl
import struct
import termios
import threading
import time
from typing import Any

from shoal.net.handshake import TLS_ALERT

CHUNK_BYTES = 1 << 18
LINGER_S = 10.0
"""Seconds for sending what was written before a close."""
ACKNOWLEDGED_POLL_S = 0.005
"""The kernel reports no event when the peer's host has acknowledged what was sent, so a closing pump looks."""
EXIT_FLUSH_S = 5.0
ALERT_DRAIN_S = 0.5
_RECORD_BYTES = 1 << 15
_ENDED = select.POLLHUP | select.POLLERR | select.POLLNVAL

_pumps: set[TlsPump] = set()


class TlsSocket(socket.socket):
    """The end of the socketpair that the program uses. Family, addresses and TCP options are those of the connection.
    It cannot pass file descriptors."""

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
        with contextlib.suppress(OSError):  # the connection may be closed; the next read or write reports that
            self._outer.setsockopt(level, *option)

    @property
    def failure_reason(self) -> str:
        return self._pump.failure_reason


def wrap(outer: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> TlsSocket:
    """Takes ownership of `outer`. A read waits for the TLS handshake, and finds a closed socket if that fails; then
    `failure_reason` says why. RuntimeError if no thread is available."""
    inner, end = socket.socketpair()
    pump = TlsPump(outer, inner, context, server_side=server_side)
    try:
        wrapped = TlsSocket(end, outer, pump)
        threading.Thread(target=pump.run, name="shoal-tls", daemon=True).start()
    except (OSError, RuntimeError):
        for sock in (outer, inner, end):
            sock.close()
        raise
    return wrapped


class TlsPump:
    """Belongs to its thread, except `failure_reason` and `flush`. Buffers at most two chunks per direction: it reads
    from one side only after the other side has accepted the previous data."""

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
        self._decrypt_buffer = memoryview(bytearray(CHUNK_BYTES + _RECORD_BYTES))  # room for the rest of a chunk
        self._plaintext = memoryview(b"")  # to write to the inner socket
        self._ciphertext = memoryview(b"")  # to write to the outer socket
        self._handshake_done = False
        self._peer_open = True  # the peer may send more
        self._user_open = True  # the program may send more
        self._linger_deadline_s: float | None = None  # set once the program has closed its end
        self._flushed = threading.Event()

    def run(self) -> None:
        _pumps.add(self)
        try:
            self._advance_handshake()
            while not self._done():
                self._pump_once()
        except OSError as failure:  # ssl errors are OSErrors
            self.failure_reason = _explain(failure, handshake_done=self._handshake_done)
            if not self._handshake_done:
                self._send_alert()
        finally:  # always wake a reader, and a thread in `flush`
            self._inner.close()
            self._outer.close()
            self._flushed.set()
            _pumps.discard(self)

    def flush(self, timeout_s: float) -> None:
        """From any thread: end the program's output. Waits until everything written has been sent."""
        with contextlib.suppress(OSError):
            self._inner.shutdown(socket.SHUT_RD)
        if self._handshake_done:
            self._flushed.wait(timeout_s)

    def _done(self) -> bool:
        if self._linger_deadline_s is None:
            return self._flushed.is_set() and not self._peer_open and not self._plaintext
        if not self._handshake_done or time.monotonic() >= self._linger_deadline_s:
            return True
        return self._flushed.is_set() and _unacknowledged_bytes(self._outer) == 0

    def _pump_once(self) -> None:
        outside, inside = self._wait()
        if inside & _ENDED and self._linger_deadline_s is None:
            self._start_linger()
        if outside and self._wants_peer_data:
            self._read_peer()
        elif outside and self._lingers:
            self._discard_peer_data()
        if inside and self._wants_user_data:
            self._read_user()
        self._write_user()
        self._write_peer()

    @property
    def _wants_peer_data(self) -> bool:
        return self._peer_open and not self._plaintext and self._linger_deadline_s is None

    @property
    def _lingers(self) -> bool:
        """The program has closed its end. What the peer still sends is read and discarded: the kernel resets a
        connection that is closed with unread data, and drops what it has not sent."""
        return self._linger_deadline_s is not None and self._peer_open

    @property
    def _wants_user_data(self) -> bool:
        return self._user_open and not self._ciphertext and self._handshake_done

    def _wait(self) -> tuple[int, int]:
        """Poll events of the outer and of the inner socket."""
        poll = select.poll()
        reads = self._wants_peer_data or self._lingers
        outside = (select.POLLIN if reads else 0) | (select.POLLOUT if self._ciphertext else 0)
        if outside:
            poll.register(self._outer, outside)
        if self._linger_deadline_s is None or self._wants_user_data:  # otherwise poll would report its hang-up for ever
            inside = (select.POLLIN if self._wants_user_data else 0) | (select.POLLOUT if self._plaintext else 0)
            poll.register(self._inner, inside)
        happened = dict(poll.poll(self._poll_ms()))
        return happened.get(self._outer.fileno(), 0), happened.get(self._inner.fileno(), 0)

    def _poll_ms(self) -> float | None:
        if self._linger_deadline_s is None:
            return None
        left_s = max(0.0, self._linger_deadline_s - time.monotonic())
        return 1000 * (min(left_s, ACKNOWLEDGED_POLL_S) if self._flushed.is_set() else left_s)

    # ---- from the peer to the program ----

    def _read_peer(self) -> None:
        try:
            size = self._outer.recv_into(self._read_buffer)
        except BlockingIOError:
            return
        if size:
            self._incoming.write(self._read_buffer[:size])
        else:
            self._incoming.write_eof()  # an end without TLS close_notify may be forged: it becomes an error below
        if self._handshake_done or self._advance_handshake():
            self._decrypt()

    def _discard_peer_data(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._peer_open = self._outer.recv_into(self._read_buffer) > 0

    def _advance_handshake(self) -> bool:
        """Do as much of the handshake as possible now. Returns whether it is done."""
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.do_handshake()
            self._handshake_done = True
        self._collect_ciphertext()
        self._write_peer()
        return self._handshake_done

    def _decrypt(self) -> None:
        """Decrypt everything that has arrived: TLS reports an error if we close while data is unread."""
        size = 0
        try:
            while got := self._tls.read(CHUNK_BYTES, self._decrypt_buffer[size:]):
                size += int(got)
            self._peer_open = False
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:  # raised instead of an empty read if we have sent close_notify ourselves
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

    # ---- from the program to the peer ----

    def _read_user(self) -> None:
        try:
            size = self._inner.recv_into(self._read_buffer)
        except BlockingIOError:
            return
        except ConnectionResetError:  # closed with unread data
            size = 0
        if size:
            self._tls.write(self._read_buffer[:size])
        else:
            self._user_open = False
            with contextlib.suppress(ssl.SSLError):  # it would wait for the peer's close_notify
                self._tls.unwrap()
        self._collect_ciphertext()

    def _collect_ciphertext(self) -> None:
        if self._outgoing.pending:
            more = self._outgoing.read()
            self._ciphertext = memoryview(bytes(self._ciphertext) + more if self._ciphertext else more)

    def _write_peer(self) -> None:
        try:
            if self._ciphertext:
                self._ciphertext = self._ciphertext[self._outer.send(self._ciphertext) :]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            self._end_output()
        if not self._ciphertext and not self._user_open and not self._flushed.is_set():
            self._outer.shutdown(socket.SHUT_WR)
            self._flushed.set()

    def _end_output(self) -> None:
        """The peer is gone. The program's next write fails; what the peer sent before can still be read."""
        self._ciphertext = memoryview(b"")
        self._user_open = False
        self._flushed.set()
        self._inner.shutdown(socket.SHUT_RD)

    # ---- the end ----

    def _start_linger(self) -> None:
        self._linger_deadline_s = self._linger_deadline_s or time.monotonic() + LINGER_S
        self._plaintext = memoryview(b"")

    def _send_alert(self) -> None:
        """Send the alert that explains the failure, and drain the input: closing a socket with unread data would
        discard the alert."""
        until = time.monotonic() + ALERT_DRAIN_S
        with contextlib.suppress(OSError):
            self._outer.settimeout(ALERT_DRAIN_S)
            self._outer.sendall(self._outgoing.read() or TLS_ALERT)
            self._outer.shutdown(socket.SHUT_WR)
            while (left_s := until - time.monotonic()) > 0 and self._outer.recv_into(self._read_buffer):
                self._outer.settimeout(left_s)


def _unacknowledged_bytes(sock: socket.socket) -> int:
    """What the kernel still has to deliver; 0 where it does not tell."""
    try:
        return int(struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))[0])
    except OSError:
        return 0


def _explain(failure: OSError, *, handshake_done: bool) -> str:
    """The reason that TLS gives; '' if the connection just broke."""
    reason = getattr(failure, "reason", None) or ""
    if isinstance(failure, ssl.SSLCertVerificationError):
        return f"the certificate of the other side is not accepted: {failure.verify_message}"
    if reason == "TLSV1_ALERT_PROTOCOL_VERSION" or (not handshake_done and reason == "WRONG_VERSION_NUMBER"):
        return "the other side does not use TLS, but this process does"
    if "ALERT" in reason:
        return (
            f"the other side does not accept our certificate: {reason.partition('ALERT_')[2].replace('_', ' ').lower()}"
        )
    return ""


def flush_all(timeout_s: float = EXIT_FLUSH_S) -> None:
    """Send everything that was written before the process ends, as the kernel does for plain sockets."""
    until = time.monotonic() + timeout_s
    for pump in list(_pumps):
        pump.flush(max(0.0, until - time.monotonic()))


atexit.register(flush_all)
