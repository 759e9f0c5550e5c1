"""A worker's listening sockets for its peers: a TCP port, and an abstract Unix address for peers on the same host."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from shoal.collectives.transport.greeting import Caller, Greeting, Purpose
from shoal.net.address import ANY_PORT
from shoal.net.errors import LinkError, ProtocolError
from shoal.net.host_id import host_id
from shoal.net.listener import AuthenticatedListener, connect, listen_in_range
from shoal.net.tls import TlsContexts
from shoal.spec.view import Address

Service = Callable[[socket.socket, Greeting], None]
MAX_SERVED = 256
"""Connections that an endpoint serves at once. Each has a thread."""
MAX_PARKED = 1024
"""Connections that wait for their view."""
_BACKLOG = 128


class ParkedConnection(NamedTuple):
    """`greeting` is the caller's; None for a connection that this worker made itself."""

    greeting: Greeting | None
    sock: socket.socket


class Endpoint:
    """Accepts connections of callers that know the token and sorts them by purpose.

    A `mesh` connection waits until its view starts, in whatever order views and connections come; one of an older view
    is refused. Every other connection goes to the service of its purpose, each in its own thread. Its socket is closed
    when the service returns, unless `keep_open` names the purpose. A connection for a purpose without a service is
    refused, and so is a `mesh` connection unless the endpoint `joins_views`.
    """

    def __init__(
        self,
        token: str,
        *,
        bind: str = "127.0.0.1",
        ports: range = ANY_PORT,
        services: Mapping[Purpose, Service] | None = None,
        keep_open: Collection[Purpose] = (),
        joins_views: bool = True,
        tls_contexts: TlsContexts | None = None,
    ) -> None:
        self.tls_contexts = tls_contexts
        self._services = dict(services or {})
        self._keep_open = frozenset(keep_open)
        self._joins_views = joins_views
        self._slots = threading.BoundedSemaphore(MAX_SERVED)
        self._changed = threading.Condition()
        self._parked: dict[tuple[int, int], ParkedConnection] = {}
        self._oldest_view = 0
        tcp = listen_in_range(bind, ports, backlog=_BACKLOG)
        unix = socket.socket(socket.AF_UNIX)
        unix.bind("")  # the kernel chooses a free abstract name
        unix.listen(_BACKLOG)
        name = unix.getsockname()[1:].decode()
        self.address = Address(host=bind, port=tcp.getsockname()[1], host_id=host_id(), unix=name)
        self._listener = AuthenticatedListener([tcp, unix], token, self._on_connection, tls_contexts=tls_contexts)

    @property
    def refused(self) -> int:
        """Number of refused connections: wrong token, malformed greeting, a purpose without a service, or an old
        view."""
        return self._listener.refused

    def _on_connection(self, sock: socket.socket, hello: bytes) -> None:
        greeting = Greeting.parse(hello)
        if greeting.purpose == "mesh" and self._joins_views:
            self._park(greeting.view, greeting.seat, ParkedConnection(greeting, sock))
            return
        service = self._services.get(greeting.purpose)
        if service is None:
            raise ProtocolError(f"a greeting for {greeting.purpose}, which this endpoint does not serve")
        if greeting.purpose in self._keep_open:
            service(sock, greeting)
            return
        if not self._slots.acquire(blocking=False):
            raise LinkError(f"{MAX_SERVED} connections are being served")
        try:
            with sock:
                service(sock, greeting)
        finally:
            self._slots.release()

    def park(self, view: int, seat: int, sock: socket.socket) -> None:
        """Keep this worker's own connection with a seat until the view starts. LinkError if the view has passed."""
        self._park(view, seat, ParkedConnection(None, sock))

    def _park(self, view: int, seat: int, new: ParkedConnection) -> None:
        """LinkError if the view has passed, if another connection with the seat counts, or if too many wait."""
        with self._changed:
            if view < self._oldest_view:
                raise LinkError(f"a late caller: of view {view}, but the current view is {self._oldest_view}")
            replaced = self._parked.get((view, seat))
            if replaced is not None and not _replaces(new, replaced):
                raise LinkError(f"seat {seat} has another connection in view {view}")
            if replaced is None and len(self._parked) >= MAX_PARKED:
                farthest = max(self._parked)
                if (view, seat) >= farthest:
                    raise LinkError(f"{MAX_PARKED} connections wait for their view")
                replaced = self._parked.pop(farthest)  # honest callers are of the next view
            self._parked[view, seat] = new
            self._changed.notify_all()
        if replaced is not None:
            replaced.sock.close()

    def wait_for_peers(
        self, view: int, seats: Iterable[int], *, given_up: Callable[[], bool]
    ) -> dict[int, socket.socket] | None:
        """Wait for the connections with all these seats; None if `given_up` (see `wake`)."""
        wanted = [(view, seat) for seat in seats]
        with self._changed:
            self._changed.wait_for(lambda: given_up() or all(key in self._parked for key in wanted))
            return None if given_up() else {key[1]: self._parked.pop(key).sock for key in wanted}

    def wake(self) -> None:
        """Let `wait_for_peers` check `given_up` again."""
        with self._changed:
            self._changed.notify_all()

    def drop_views_before(self, view: int) -> None:
        """Refuse callers of older views from now on."""
        with self._changed:
            self._oldest_view = max(self._oldest_view, view)
            late = [self._parked.pop(key).sock for key in list(self._parked) if key[0] < self._oldest_view]
        for sock in late:
            sock.close()

    def close(self) -> None:
        self._listener.close()
        self.drop_views_before(1 << 62)


def connect_to_peer(
    address: Address,
    token: str,
    greeting: Greeting,
    *,
    caller: Caller | None = None,
    tls_contexts: TlsContexts | None = None,
) -> socket.socket:
    """Connect to a peer, by its Unix address if it is on this host. LinkError if that fails."""
    if caller is not None:
        greeting = greeting.model_copy(update={"caller": caller.name, "connection": caller.next_connection()})
    hello = greeting.encode()
    if address.unix and address.host_id == host_id():
        return connect(socket.AF_UNIX, "\0" + address.unix, token, hello)
    return connect(_family(address.host), (address.host, address.port), token, hello, tls_contexts=tls_contexts)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _replaces(new: ParkedConnection, old: ParkedConnection) -> bool:
    """A connection that this worker made itself counts before any caller's; a caller can replace only its own."""
    if new.greeting is None or old.greeting is None:
        return new.greeting is None
    return old.greeting.is_older_than(new.greeting)
