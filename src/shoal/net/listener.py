"""Listening sockets that accept only clients that know the token, and the client side of that.

Connections of unknown clients and port scanners are refused and counted. Each occupies a thread for at most
`handshake.TIMEOUT_S`, and the number of such threads is bounded. When there are too many, the oldest that has not
proved the token makes room: clients with the token need milliseconds, so no crowd of half-open connections keeps them
out. Clients that have proved it do not count.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable, Sequence

from shoal.errors import error
from shoal.net import handshake, tls
from shoal.net.errors import LinkError, TlsError
from shoal.net.tls import TlsContexts

MAX_CONCURRENT_HANDSHAKES = 256


class AuthenticatedListener:
    """Calls `on_connect(sock, hello)` in a separate thread for each authenticated client; `on_connect` then owns the
    socket. If it raises LinkError or OSError, the client counts as refused. With `tls_contexts`, TCP clients must use
    TLS."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        token: handshake.Token,
        on_connect: Callable[[socket.socket, bytes], None],
        *,
        tls_contexts: TlsContexts | None = None,
    ) -> None:
        self._listeners = list(listeners)
        self._token = token
        self._tls_contexts = tls_contexts
        self._on_connect = on_connect
        self._handshakes: dict[socket.socket, None] = {}  # the oldest first
        self._handshake_ended = threading.Condition()
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
            self._make_room()
            self._start_handshake(sock)

    def _make_room(self) -> None:
        """Close the oldest connection without a proof if there are too many, and wait until its thread ends."""
        with self._handshake_ended:
            while len(self._handshakes) >= MAX_CONCURRENT_HANDSHAKES:
                oldest = next(iter(self._handshakes))
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
                self._handshake_ended.wait(handshake.TIMEOUT_S)

    def _start_handshake(self, sock: socket.socket) -> None:
        with self._handshake_ended:
            self._handshakes[sock] = None
        try:
            threading.Thread(target=self._authenticate, args=(sock,), name="shoal-caller", daemon=True).start()
        except RuntimeError:  # no thread is available; keep listening
            self._end_handshake(sock)
            self._refuse(sock)

    def _end_handshake(self, sock: socket.socket) -> None:
        with self._handshake_ended:
            self._handshakes.pop(sock, None)
            self._handshake_ended.notify()

    def _authenticate(self, accepted: socket.socket) -> None:
        sock = accepted
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
            self._end_handshake(accepted)
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


def listen_in_range(host: str, ports: range, *, backlog: int) -> socket.socket:
    """Listen on the first free port of the range. SH611 if all are in use."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports:
        try:
            return socket.create_server((host, port), family=family, backlog=backlog)
        except OSError as failure:
            if failure.errno != errno.EADDRINUSE:
                raise
    fix = "Give network.ports one port for each worker and server of a machine, and some more."
    message = f"all ports from {ports[0]} to {ports[-1]} of {host} are in use"
    raise error("SH611", message, where="network.ports", fix=fix)


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
