"""The connections of one view, from every worker to every other. A new view makes new ones, so no late frame arrives.

Every wait here can be ended: `abort`, from any thread, shuts the sockets down.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable, Iterator

from shoal.collectives.transport import frames
from shoal.collectives.transport.connection import BuffersFor, PeerError, PeerLink
from shoal.collectives.transport.endpoint import Endpoint, connect_to_peer
from shoal.collectives.transport.frames import PeerFrame
from shoal.collectives.transport.greeting import Caller, Greeting
from shoal.net.errors import LinkError
from shoal.spec.view import Address, View

CONNECT_TIMEOUT_S = 1.0
"""Seconds without a connection before a peer counts as unreachable."""
_RETRY_S = 0.02


class Mesh:
    """Made and used by the loop's thread; `abort` may come from any thread.

    A failure raises a LinkError. The mesh cannot be used afterwards, and it sends its peers the seat to blame.
    """

    def __init__(self, view: View, seat: int, *, endpoint: Endpoint, token: str) -> None:
        self.view = view.number
        self.seat = seat
        self.links: dict[int, PeerLink] = {}
        self._addresses = view.addresses
        self._peers = [peer for peer in sorted(view.carries) if peer != seat]
        self._endpoint = endpoint
        self._token = token
        self._aborted = threading.Event()
        self._guard = threading.Lock()
        self._connect_error: PeerError | None = None

    def connect(self) -> None:
        """Connect to peers with a lower seat, accept those with a higher one. Returns when all peers are connected."""
        self._endpoint.drop_views_before(self.view)
        for peer in self._peers:
            if peer < self.seat:
                threading.Thread(
                    target=self._connect_to, args=(peer, self._addresses[peer]), name="shoal-call", daemon=True
                ).start()
        socks = self._endpoint.wait_for_peers(self.view, self._peers, given_up=self._gave_up)
        if socks is None:
            raise self._connect_error if self._connect_error and not self._aborted.is_set() else self._aborted_error()
        with self._guard:
            self.links = {peer: PeerLink(peer, sock, view=self.view) for peer, sock in socks.items()}
            if self._aborted.is_set():
                self._shut_down()
        for link in self.links.values():
            link.post(PeerFrame(frames.HERE, self.view, 0, self.seat))
        self.exchange(frames.HERE, 0, lambda link, frame: [])

    def _connect_to(self, peer: int, address: Address) -> None:
        """Runs in its own thread: connecting may take seconds, and an abort does not wait for it."""
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        caller, greeting = Caller(), Greeting(purpose="mesh", seat=self.seat, view=self.view)
        while True:
            try:
                sock = connect_to_peer(
                    address, self._token, greeting, caller=caller, tls_contexts=self._endpoint.tls_contexts
                )
                break
            except LinkError as failure:
                if self._aborted.wait(_RETRY_S) or time.monotonic() > deadline:
                    self._connect_error = PeerError(peer, f"was not reached: {failure}")
                    self._endpoint.wake()
                    return
        try:
            self._endpoint.park(self.view, peer, sock)
        except LinkError:
            sock.close()  # a newer view has begun

    def _gave_up(self) -> bool:
        return self._aborted.is_set() or self._connect_error is not None

    def frame(self, kind: int, step: int, *, flags: int = 0, size: int = 0, filled: int = 0) -> PeerFrame:
        return PeerFrame(kind, self.view, step, self.seat, flags, size, filled)

    @property
    def remote_links(self) -> list[PeerLink]:
        """Links to peers on other hosts, which share no memory with this worker."""
        return [link for link in self.links.values() if not link.same_host]

    def exchange(
        self, kind: int, step: int, buffers_for: BuffersFor, *, on_progress: Callable[[], None] | None = None
    ) -> float:
        """Send the queued frames and receive one frame from every peer, all at once, so that no deadlock is possible.

        `on_progress` is called whenever bytes have moved. Returns the seconds waited for peers that had not begun. The
        same in parts: `expect`, any number of `poll`, `finish`.
        """
        self.expect(kind, step)
        return self.finish(buffers_for, on_progress)

    def expect(self, kind: int, step: int) -> None:
        for link in self.links.values():
            link.expect(kind, step)

    def poll(self, buffers_for: BuffersFor, on_progress: Callable[[], None] | None = None) -> None:
        """Send and receive what is possible without waiting."""
        with self._disconnect_on_failure():
            for link in self.links.values():
                link.send()
                link.receive(buffers_for)
            if on_progress:
                on_progress()

    def finish(self, buffers_for: BuffersFor, on_progress: Callable[[], None] | None = None) -> float:
        with self._disconnect_on_failure():
            return self._exchange(buffers_for, on_progress)

    @contextlib.contextmanager
    def _disconnect_on_failure(self) -> Iterator[None]:
        try:
            yield
        except LinkError as failure:
            if self._aborted.is_set():  # the abort caused the failure
                raise self._aborted_error() from failure
            self.disconnect(failure.seat if isinstance(failure, PeerError) else self.seat)
            raise

    def _exchange(self, buffers_for: BuffersFor, on_progress: Callable[[], None] | None) -> float:
        poll = select.poll()
        busy: dict[int, PeerLink] = {}
        for link in self.links.values():
            link.send()
            if not _poll_events(link):
                continue
            busy[link.fileno()] = link
            poll.register(link, _poll_events(link))
        if on_progress:
            on_progress()
        waited_s = 0.0
        while busy:
            idle = not any(link.sending or link.frame_received for link in busy.values())
            start = time.perf_counter()
            ready = poll.poll()
            if idle:
                waited_s += time.perf_counter() - start
            for fd, _ in ready:
                link = busy[fd]
                if link.sending:
                    link.send()
                if link.receiving:
                    link.receive(buffers_for)
                if events := _poll_events(link):
                    poll.modify(fd, events)
                else:
                    poll.unregister(fd)
                    del busy[fd]
            if on_progress:
                on_progress()
        return waited_s

    def _aborted_error(self) -> LinkError:
        return LinkError(f"view {self.view} was aborted")

    def disconnect(self, blamed: int) -> None:
        """Leave, and send peers the seat that caused it."""
        for link in self.links.values():
            link.disconnect(PeerFrame(frames.LEFT, self.view, blamed, self.seat))

    @property
    def bytes_sent(self) -> int:
        return sum(link.bytes_sent for link in self.links.values())

    @property
    def moved_bytes(self) -> int:
        """Bytes sent and received. Called from any thread."""
        return sum(link.bytes_sent + link.bytes_received for link in list(self.links.values()))

    def abort(self) -> None:
        """Every wait, current or future, ends with a LinkError."""
        self._aborted.set()
        self._endpoint.wake()
        with self._guard:
            self._shut_down()

    def _shut_down(self) -> None:
        for link in self.links.values():
            link.shut_down()

    def close(self) -> None:
        with self._guard:
            self._shut_down()
            for link in self.links.values():
                link.close()
            self.links = {}


def _poll_events(link: PeerLink) -> int:
    return (select.POLLIN if link.receiving else 0) | (select.POLLOUT if link.sending else 0)
