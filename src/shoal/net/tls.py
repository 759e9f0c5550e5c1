"""TLS for TCP connections, if this process uses it. Unix sockets stay plain: other machines cannot reach them.

An encrypted connection behaves like a plain socket, see `tls_pump`. The token handshake runs inside it.
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass

from shoal.net.errors import LinkError
from shoal.net.tls_pump import TlsSocket, wrap

TlsContexts = tuple[ssl.SSLContext, ssl.SSLContext]
"""The context for accepted connections, and the context for outgoing connections."""


@dataclass
class _ProcessTls:
    contexts: TlsContexts | None = None


_process = _ProcessTls()


def configure(contexts: TlsContexts | None) -> None:
    """Use TLS for all listeners and connections of this process. Call it once, at the start."""
    _process.contexts = contexts


def configured() -> TlsContexts | None:
    return _process.contexts


def wrap_accepted(sock: socket.socket, contexts: TlsContexts | None) -> socket.socket:
    """The socket to use for an accepted connection; it owns `sock`. LinkError if no thread is available."""
    return sock if contexts is None else _wrap(sock, contexts[0], server_side=True)


def wrap_connected(sock: socket.socket) -> socket.socket:
    """The same for an outgoing connection."""
    return sock if _process.contexts is None else _wrap(sock, _process.contexts[1], server_side=False)


def _wrap(sock: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> socket.socket:
    if sock.family == socket.AF_UNIX:
        return sock
    try:
        return wrap(sock, context, server_side=server_side)
    except RuntimeError as failure:
        raise LinkError(f"no thread for a connection: {failure}") from failure


def failure_reason(sock: socket.socket) -> str:
    """Why TLS ended the connection; '' if it did not."""
    return sock.failure_reason if isinstance(sock, TlsSocket) else ""
