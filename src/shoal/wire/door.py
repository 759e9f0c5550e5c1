"""A door: listening sockets that let in only those who know the token.

Strangers, scanners and noise are refused and counted. Each costs a thread for three seconds at most, and there are
never more than a few of them.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence

from shoal.wire import handshake, tls

MOST_AT_ONCE = 64


class Door:
    """`welcome(sock, hello)` is called in a thread of its own for each caller that proved itself; it owns the socket
    then. A LinkError or OSError out of it counts as a refusal."""

    def __init__(
        self, listeners: Sequence[socket.socket], token: str, welcome: Callable[[socket.socket, bytes], None]
    ) -> None:
        self._listeners = list(listeners)
        self._token = token
        self._tls = tls.used()
        self._welcome = welcome
        self._places = threading.BoundedSemaphore(MOST_AT_ONCE)
        self._counting = threading.Lock()
        self.refused = 0
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), name="shoal-door", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                if listener.fileno() < 0:
                    return
                time.sleep(0.01)  # the caller left before we looked, or there are too many open files: do not spin
                continue
            if self._places.acquire(blocking=False):
                self._attend(sock)
            else:
                self._refuse(sock)

    def _attend(self, sock: socket.socket) -> None:
        try:
            threading.Thread(target=self._let_in, args=(sock,), name="shoal-caller", daemon=True).start()
        except RuntimeError:  # no more threads are to be had; the door stays open
            self._places.release()
            self._refuse(sock)

    def _let_in(self, sock: socket.socket) -> None:
        try:
            _send_at_once(sock)
            sock = tls.answering(sock, self._tls)
            sock.settimeout(handshake.TIMEOUT_S)
            hello = handshake.answer(sock, self._token)
            sock.settimeout(None)
        except (OSError, handshake.LinkError):
            self._refuse(sock)
            return
        finally:
            self._places.release()
        try:
            self._welcome(sock, hello)
        except (OSError, handshake.LinkError):
            self._refuse(sock)

    def _refuse(self, sock: socket.socket) -> None:
        with self._counting:
            self.refused += 1
        sock.close()

    def close(self) -> None:
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()


def call(family: socket.AddressFamily, address: object, token: str, hello: bytes) -> socket.socket:
    """Connect and greet. LinkError if the other side cannot be reached or trusted."""
    sock = socket.socket(family)
    try:
        sock.settimeout(handshake.TIMEOUT_S)
        sock.connect(address)  # type: ignore[arg-type]
        _send_at_once(sock)
        sock = tls.calling(sock)
        sock.settimeout(handshake.TIMEOUT_S)
        handshake.greet(sock, token, hello)
        sock.settimeout(None)
    except (OSError, OverflowError, handshake.LinkError) as failure:
        sock.close()
        if trouble := tls.trouble(sock):
            raise handshake.TlsError(trouble) from failure
        if isinstance(failure, handshake.LinkError):
            raise
        raise handshake.LinkError(f"cannot reach {address!r}: {failure}") from failure
    return sock


def call_host(host: str, port: int, token: str, hello: bytes) -> socket.socket:
    """The same for a name or a literal address of either family; a name's addresses are tried in their order."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)  # given a port above 65535 it takes another one
    except (OSError, UnicodeError) as failure:
        raise handshake.LinkError(f"cannot find {host}: {failure}") from failure
    *others, last = [(family, (address[0], port, *address[2:])) for family, _, _, _, address in found]
    for family, address in others:
        with contextlib.suppress(handshake.LinkError):
            return call(family, address, token, hello)
    return call(*last, token, hello)


def _send_at_once(sock: socket.socket) -> None:
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
