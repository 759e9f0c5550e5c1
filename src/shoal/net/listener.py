"""Listening sockets that accept only clients that know the token, and the client side of that.

Connections of unknown clients and port scanners are refused and counted. Each occupies a thread for at most
`handshake.TIMEOUT_S`, and the number of such threads is bounded.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence

from shoal.net import handshake, tls
from shoal.net.errors import LinkError, TlsError
from shoal.net.tls import TlsContexts

MAX_CONCURRENT_HANDSHAKES = 64


class AuthenticatedListener:
    """Calls `on_connect(sock, hello)` in a separate thread for each authenticated client; `on_connect` then owns the
    socket. If it raises LinkError or OSError, the client counts as refused. With `tls_contexts`, TCP clients must use
    TLS."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        token: str,
        on_connect: Callable[[socket.socket, bytes], None],
        *,
        tls_contexts: TlsContexts | None = None,
    ) -> None:
        self._listeners = list(listeners)
        self._token = token
        self._tls_contexts = tls_contexts
        self._on_connect = on_connect
        self._handshake_slots = threading.BoundedSemaphore(MAX_CONCURRENT_HANDSHAKES)
        self._refused_lock = threading.Lock()
        self.refused = 0
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), name="shoal-listener", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                if listener.fileno() < 0:
                    return
                time.sleep(0.01)  # the client is gone already, or there are too many open files: do not spin
                continue
            if self._handshake_slots.acquire(blocking=False):
                self._start_handshake(sock)
            else:
                self._refuse(sock)

    def _start_handshake(self, sock: socket.socket) -> None:
        try:
            threading.Thread(target=self._authenticate, args=(sock,), name="shoal-caller", daemon=True).start()
        except RuntimeError:  # no thread is available; keep listening
            self._handshake_slots.release()
            self._refuse(sock)

    def _authenticate(self, sock: socket.socket) -> None:
        try:
            _disable_nagle(sock)
            sock = tls.wrap_accepted(sock, self._tls_contexts)
            sock.settimeout(handshake.TIMEOUT_S)
            hello = handshake.server_handshake(sock, self._token)
            sock.settimeout(None)
        except (OSError, LinkError):
            self._refuse(sock)
            return
        finally:
            self._handshake_slots.release()
        try:
            self._on_connect(sock, hello)
        except (OSError, LinkError):
            self._refuse(sock)

    def _refuse(self, sock: socket.socket) -> None:
        with self._refused_lock:
            self.refused += 1
        sock.close()

    def close(self) -> None:
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()


def connect(
    family: socket.AddressFamily,
    address: object,
    token: str,
    hello: bytes,
    *,
    tls_contexts: TlsContexts | None = None,
) -> socket.socket:
    """Connect and do the handshake. LinkError if the other side cannot be reached or authenticated."""
    sock = socket.socket(family)
    try:
        sock.settimeout(handshake.TIMEOUT_S)
        sock.connect(address)  # type: ignore[arg-type]
        _disable_nagle(sock)
        sock = tls.wrap_connected(sock, tls_contexts)
        sock.settimeout(handshake.TIMEOUT_S)
        handshake.client_handshake(sock, token, hello)
        sock.settimeout(None)
    except (OSError, OverflowError, LinkError) as failure:
        sock.close()
        if trouble := tls.failure_reason(sock):
            raise TlsError(trouble) from failure
        if isinstance(failure, LinkError):
            raise
        raise LinkError(f"cannot reach {address!r}: {failure}") from failure
    return sock


def connect_host(
    host: str, port: int, token: str, hello: bytes, *, tls_contexts: TlsContexts | None = None
) -> socket.socket:
    """`connect` to a host name or a literal IPv4 or IPv6 address; the addresses of a name are tried in order."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)  # it truncates ports above 65535
    except (OSError, UnicodeError) as failure:
        raise LinkError(f"cannot find {host}: {failure}") from failure
    *others, last = [(family, (address[0], port, *address[2:])) for family, _, _, _, address in found]
    for family, address in others:
        with contextlib.suppress(LinkError):
            return connect(family, address, token, hello, tls_contexts=tls_contexts)
    return connect(*last, token, hello, tls_contexts=tls_contexts)


def _disable_nagle(sock: socket.socket) -> None:
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
