"""TLS for what goes over TCP, if this process uses it. Unix sockets stay as they are: nobody else can listen there.

A connection that is encrypted looks like one that is not, see `tunnel`; the token is proved inside it.
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass

from shoal.net.errors import LinkError
from shoal.net.tls_pump import TlsSocket, wrap

TlsContexts = tuple[ssl.SSLContext, ssl.SSLContext]
"""One to answer callers with, and one to call."""


@dataclass
class _ProcessTls:
    contexts: TlsContexts | None = None


_process = _ProcessTls()


def configure(contexts: TlsContexts | None) -> None:
    """From now on, for all doors that this process opens and all calls that it makes. Said once, at the start."""
    _process.contexts = contexts


def configured() -> TlsContexts | None:
    return _process.contexts


def wrap_accepted(sock: socket.socket, contexts: TlsContexts | None) -> socket.socket:
    """What to talk to a caller through; it owns the socket then. LinkError if there is no thread for it."""
    return sock if contexts is None else _wrap(sock, contexts[0], server_side=True)


def wrap_connected(sock: socket.socket) -> socket.socket:
    """The same for one whom we called."""
    return sock if _process.contexts is None else _wrap(sock, _process.contexts[1], server_side=False)


def _wrap(sock: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> socket.socket:
    if sock.family == socket.AF_UNIX:
        return sock
    try:
        return wrap(sock, context, server_side=server_side)
    except RuntimeError as failure:
        raise LinkError(f"no thread for a connection: {failure}") from failure


def failure_reason(sock: socket.socket) -> str:
    """Why there is no agreement with the other side on TLS, if that is what ended the connection."""
    return sock.failure_reason if isinstance(sock, TlsSocket) else ""
