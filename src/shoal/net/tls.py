"""TLS for TCP connections. Unix sockets are not encrypted: no other user can listen there.

An encrypted connection is used like a plain socket, see `tls_pump`; the token is proved inside it. Contexts are passed
to each listener and to each call: one process may drive runs with different certificates.
"""

from __future__ import annotations

import socket
import ssl

from shoal.net.errors import LinkError
from shoal.net.tls_pump import TlsSocket, wrap

TlsContexts = tuple[ssl.SSLContext, ssl.SSLContext]
"""The context for accepted connections, and the context for outgoing connections."""


def wrap_accepted(sock: socket.socket, contexts: TlsContexts | None) -> socket.socket:
    """The socket for an accepted connection; with TLS it owns `sock`. LinkError if no thread is available."""
    return sock if contexts is None else _wrap(sock, contexts[0], server_side=True)


def wrap_connected(sock: socket.socket, contexts: TlsContexts | None) -> socket.socket:
    """The same for an outgoing connection."""
    return sock if contexts is None else _wrap(sock, contexts[1], server_side=False)


def _wrap(sock: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> socket.socket:
    if sock.family == socket.AF_UNIX:
        return sock
    try:
        return wrap(sock, context, server_side=server_side)
    except RuntimeError as failure:
        raise LinkError(f"no thread for a connection: {failure}") from failure


def failure_reason(sock: socket.socket) -> str:
    """Why TLS closed the connection; '' if it did not."""
    return sock.failure_reason if isinstance(sock, TlsSocket) else ""
