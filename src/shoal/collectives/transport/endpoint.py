"""Where peers reach a worker: a TCP port, and for peers on the same host an abstract Unix address."""

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
    """Callers that know the token say what they want. Those for the `mesh` of a view wait until that view takes
    them, in whatever order views and callers come; callers of an older view are refused. Those for the `state`, or to
    `follow` it, for what lanes remember (`memory`), or to measure the link (`pace`), are given to `serve`, each in a
    thread of its own; their socket is closed when `serve` returns, unless it `keeps` those who call for this purpose.
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
        unix.bind("")  # the kernel gives a free abstract name
        unix.listen(_BACKLOG)
        name = unix.getsockname()[1:].decode()
        self.address = Address(host=bind, port=tcp.getsockname()[1], host_id=host_id(), unix=name)
        self._listener = AuthenticatedListener([tcp, unix], token, self._on_connection, tls_contexts=tls_contexts)

    @property
    def refused(self) -> int:
        """Strangers, noise and late callers."""
        return self._listener.refused

    def _on_connection(self, sock: socket.socket, hello: bytes) -> None:
        said = _parse_hello(hello)
        if said["purpose"] == "mesh":
            self.park(said["view"], said["seat"], sock)
        elif said["purpose"] in self._keep_open:
            self._serve(sock, said)
        elif said["purpose"] not in ("state", "follow", "memory", "pace"):
            raise LinkError("a greeting for somebody else")
        else:
            with sock:
                self._serve(sock, said)

    def park(self, view: int, seat: int, sock: socket.socket) -> None:
        """A connection with this seat is there for this view. LinkError if the view has passed."""
        with self._changed:
            if view < self._oldest_view:
                raise LinkError(f"a late caller: view {view}, and {self._oldest_view} counts")
            before = self._parked.pop((view, seat), None)
            self._parked[view, seat] = sock
            self._changed.notify_all()
        if before:
            before.close()

    def wait_for_peers(
        self, view: int, seats: Iterable[int], *, given_up: Callable[[], bool]
    ) -> dict[int, socket.socket] | None:
        """The connections with all these seats, as soon as all are there; None if `given_up` (see `wake`)."""
        wanted = [(view, seat) for seat in seats]
        with self._changed:
            self._changed.wait_for(lambda: given_up() or all(key in self._parked for key in wanted))
            return None if given_up() else {key[1]: self._parked.pop(key) for key in wanted}

    def wake(self) -> None:
        """Let whoever waits in `take` look again."""
        with self._changed:
            self._changed.notify_all()

    def drop_views_before(self, view: int) -> None:
        """Callers of older views are late from now on."""
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
        said = json.loads(hello)
        good = said["purpose"] in PURPOSES and type(said["seat"]) is type(said["view"]) is int
    except (ValueError, KeyError, TypeError, RecursionError) as failure:
        raise LinkError(f"a greeting that says nothing: {failure}") from failure
    if not good:
        raise LinkError("a greeting that says nothing")
    return dict(said)


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
    """Call a peer as `seat`, over its Unix address if it is on this host. LinkError if it cannot be had."""
    hello = json.dumps({"purpose": purpose, "seat": seat, "view": view, **extra}).encode()
    if address.unix and address.host_id == host_id():
        return connect(socket.AF_UNIX, "\0" + address.unix, token, hello)
    return connect(_family(address.host), (address.host, address.port), token, hello, tls_contexts=tls_contexts)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
