"""Errors of connections between processes.

    LinkError                  the connection cannot be used
    ├── TokenError             the two sides do not have the same token
    ├── TlsError               only one side uses TLS, or one rejects the other's certificate
    ├── ProtocolError          the peer sends something that the protocol does not allow
    ├── PeerError              collectives.transport.connection: a named worker is gone or misbehaves
    ├── OverlapError           collectives.ordered_allreduce
    ├── RefusedError           paramserver.client
    ├── StaleViewError         paramserver.client
    └── RowsUnreadableError    paramserver.sparse.handlers

Shoal catches them where it can reconnect, wait or evict. A user sees one only inside a `ShoalError` with a code.
"""

from __future__ import annotations


class LinkError(Exception):
    """The connection cannot be used: it is closed, was refused, or the peer breaks the protocol."""


class TokenError(LinkError):
    """The two sides do not have the same token."""


class TlsError(LinkError):
    """Only one of the two sides uses TLS, or one rejects the other's certificate."""


class ProtocolError(LinkError):
    """The peer sends something that the protocol does not allow."""
