"""TLS for what goes over TCP, if this process uses it. Unix sockets stay as they are: nobody else can listen there.

A connection that is encrypted looks like one that is not, see `tunnel`; the token is proved inside it.
"""

from __future__ import annotations

import socket
import ssl
from dataclasses import dataclass

from shoal.wire.handshake import LinkError
from shoal.wire.tunnel import Tunnel, dig

Contexts = tuple[ssl.SSLContext, ssl.SSLContext]
"""One to answer callers with, and one to call."""


@dataclass
class _Setting:
    contexts: Contexts | None = None


_process = _Setting()


def use(contexts: Contexts | None) -> None:
    """From now on, for all doors that this process opens and all calls that it makes. Said once, at the start."""
    _process.contexts = contexts


def used() -> Contexts | None:
    return _process.contexts


def answering(sock: socket.socket, contexts: Contexts | None) -> socket.socket:
    """What to talk to a caller through; it owns the socket then. LinkError if there is no thread for it."""
    return sock if contexts is None else _through(sock, contexts[0], answers=True)


def calling(sock: socket.socket) -> socket.socket:
    """The same for one whom we called."""
    return sock if _process.contexts is None else _through(sock, _process.contexts[1], answers=False)


def _through(sock: socket.socket, context: ssl.SSLContext, *, answers: bool) -> socket.socket:
    if sock.family == socket.AF_UNIX:
        return sock
    try:
        return dig(sock, context, answers=answers)
    except RuntimeError as failure:
        raise LinkError(f"no thread for a connection: {failure}") from failure


def trouble(sock: socket.socket) -> str:
    """Why there is no agreement with the other side on TLS, if that is what ended the connection."""
    return sock.trouble if isinstance(sock, Tunnel) else ""
