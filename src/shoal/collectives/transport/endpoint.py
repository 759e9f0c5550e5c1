"""A worker's listening sockets for its peers: a TCP port, and an abstract Unix address for peers on the same host."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any

from shoal.net.errors import LinkError
from shoal.net.host_id import host_id
from shoal.net.listener import AuthenticatedListener, connect
from shoal.net.tls import TlsContexts
from shoal.spec.view import Address

Serve = Callable[[socket.socket, dict[str, Any]], None]
PURPOSES = ("mesh", "state", "follow", "memory", "pace", "push", "chain")
_BACKLOG = 128


class Endpoint:
    """Accepts connections of callers that know the token and sorts them by purpose.

    A `mesh` connection waits until its view starts, in whatever order views and connections come; one of an older view
    is refused. Connections for the `state`, for the state stream (`follow`), for residuals (`memory`) and for link
    measurements (`pace`) go to `serve`, each in its own thread. Their socket is closed when `serve` returns, unless
    `keep_open` names the purpose.
    """

    def __init__(
        self,
        token: str,
        *,
        bind: str = "127.0.0.1",
        serve: Serve,
        keep_open: tuple[str, ...] = (),
        tls_contexts: TlsContexts | None = None,
    ) -> None:
        self.tls_contexts = tls_contexts
        self._serve = serve
        self._keep_open = keep_open
        self._changed = threading.Condition()
        self._parked: dict[tuple[int, int], socket.socket] = {}
        self._oldest_view = 0
        tcp = socket.create_server((bind, 0), family=_family(bind), backlog=_BACKLOG)
        unix = socket.socket(socket.AF_UNIX)
        unix.bind("")  # the kernel chooses a free abstract name
        unix.listen(_BACKLOG)
        name = unix.getsockname()[1:].decode()
        self.address = Address(host=bind, port=tcp.getsockname()[1], host_id=host_id(), unix=name)
        self._listener = AuthenticatedListener([tcp, unix], token, self._on_connection, tls_contexts=tls_contexts)

    @property
    def refused(self) -> int:
        """Number of refused connections: wrong token, malformed greeting, or an old view."""
        return self._listener.refused

    def _on_connection(self, sock: socket.socket, hello: bytes) -> None:
        greeting = _parse_hello(hello)
        if greeting["purpose"] == "mesh":
            self.park(greeting["view"], greeting["seat"], sock)
        elif greeting["purpose"] in self._keep_open:
            self._serve(sock, greeting)
        elif greeting["purpose"] not in ("state", "follow", "memory", "pace"):
            raise LinkError("a greeting with a purpose that this endpoint does not serve")
        else:
            with sock:
                self._serve(sock, greeting)

    def park(self, view: int, seat: int, sock: socket.socket) -> None:
        """Keep a connection with this seat until its view starts. LinkError if the view has passed."""
        with self._changed:
            if view < self._oldest_view:
                raise LinkError(f"a late caller: of view {view}, but the current view is {self._oldest_view}")
            replaced = self._parked.pop((view, seat), None)
            self._parked[view, seat] = sock
            self._changed.notify_all()
        if replaced:
            replaced.close()

    def wait_for_peers(
        self, view: int, seats: Iterable[int], *, given_up: Callable[[], bool]
    ) -> dict[int, socket.socket] | None:
        """Wait for the connections with all these seats; None if `given_up` (see `wake`)."""
        wanted = [(view, seat) for seat in seats]
        with self._changed:
            self._changed.wait_for(lambda: given_up() or all(key in self._parked for key in wanted))
            return None if given_up() else {key[1]: self._parked.pop(key) for key in wanted}

    def wake(self) -> None:
        """Let `wait_for_peers` check `given_up` again."""
        with self._changed:
            self._changed.notify_all()

    def drop_views_before(self, view: int) -> None:
        """Refuse callers of older views from now on."""
        with self._changed:
            self._oldest_view = max(self._oldest_view, view)
            late = [self._parked.pop(key) for key in list(self._parked) if key[0] < self._oldest_view]
        for sock in late:
            sock.close()

    def close(self) -> None:
        self._listener.close()
        self.drop_views_before(1 << 62)


def _parse_hello(hello: bytes) -> dict[str, Any]:
    try:
        greeting = json.loads(hello)
        good = greeting["purpose"] in PURPOSES and type(greeting["seat"]) is type(greeting["view"]) is int
    except (ValueError, KeyError, TypeError, RecursionError) as failure:
        raise LinkError(f"a malformed greeting: {failure}") from failure
    if not good:
        raise LinkError("a malformed greeting")
    return dict(greeting)


def connect_to_peer(
    address: Address,
    token: str,
    *,
    purpose: str,
    seat: int,
    view: int,
    tls_contexts: TlsContexts | None = None,
    **extra: Any,
) -> socket.socket:
    """Connect to a peer as `seat`, by its Unix address if it is on this host. LinkError if that fails."""
    hello = json.dumps({"purpose": purpose, "seat": seat, "view": view, **extra}).encode()
    if address.unix and address.host_id == host_id():
        return connect(socket.AF_UNIX, "\0" + address.unix, token, hello)
    return connect(_family(address.host), (address.host, address.port), token, hello, tls_contexts=tls_contexts)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
