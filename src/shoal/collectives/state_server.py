"""Peers read this worker's state from its memory while its main thread waits."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Protocol

from shoal.checkpoint.state_format import receive_state, send_state
from shoal.checkpoint.state_tree import State
from shoal.collectives.transport.greeting import Greeting
from shoal.net.errors import LinkError
from shoal.spec.view import Address

MAX_WAIT_S = 10.0
"""Seconds that a caller waits for the server to open for its view."""


class Connect(Protocol):
    """Connects to a peer's endpoint and completes the handshake; LinkError if that fails."""

    def __call__(self, address: Address, token: str, greeting: Greeting) -> socket.socket: ...


class StateServer:
    """`open` and `close` belong to the main thread, `serve` to one thread per caller.

    Between `open` and `close` the state does not change; before and after, no thread reads it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._view = 0  # the newest that the server was opened for
        self._state: Callable[[], State] | None = None
        self._readers: set[socket.socket] = set()
        self.served_bytes = 0

    def open(self, view: int, state: Callable[[], State]) -> None:
        """Serve callers of this view, including those already waiting. `state()` is called in their threads.

        An open server is closed first.
        """
        self.close()
        with self._changed:
            self._view, self._state = view, state
            self._changed.notify_all()

    def close(self, *, timeout_s: float = 0.0) -> None:
        """Return when no caller reads any more; callers that still read after the timeout are disconnected."""
        with self._changed:
            self._state = None
            self._changed.wait_for(lambda: not self._readers, timeout=timeout_s)
            for sock in self._readers:
                _shut_down(sock)
            self._changed.wait_for(lambda: not self._readers)

    def serve(self, sock: socket.socket, greeting: Greeting) -> None:
        """Wait until the server is open for the caller's view, send the state, close the socket.

        A caller of an older view, or one that waited too long, gets a closed socket.
        """
        with sock:
            state = self._admit(sock, greeting.view)
            if state is None:
                return
            try:
                with contextlib.suppress(LinkError):  # the caller is gone or was disconnected
                    self._count_bytes(send_state(sock, state()))
            finally:
                self._remove_reader(sock)

    def _admit(self, sock: socket.socket, view: int) -> Callable[[], State] | None:
        def decided() -> bool:
            return view < self._view or (view == self._view and self._state is not None)

        with self._changed:
            if not self._changed.wait_for(decided, timeout=MAX_WAIT_S) or view < self._view:
                return None
            self._readers.add(sock)
            return self._state

    def _count_bytes(self, sent_bytes: int) -> None:
        with self._changed:
            self.served_bytes += sent_bytes

    def _remove_reader(self, sock: socket.socket) -> None:
        """Called before the socket is closed, so that `close` never shuts down a reused descriptor."""
        with self._changed:
            self._readers.discard(sock)
            self._changed.notify_all()


def _shut_down(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def fetch_state(
    address: Address,
    token: str,
    *,
    seat: int,
    view: int,
    max_bytes: int,
    connect: Connect,
    on_connect: Callable[[socket.socket], None] | None = None,
) -> State:
    """Fetch the state of the peer at an address; LinkError if that fails.

    `on_connect` gets the socket: another thread that shuts it down ends the wait at once.
    """
    with connect(address, token, Greeting(purpose="state", seat=seat, view=view)) as sock:
        if on_connect is not None:
            on_connect(sock)
        return receive_state(sock, max_bytes=max_bytes)
