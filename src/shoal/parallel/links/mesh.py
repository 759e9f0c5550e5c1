"""The connections of one view: every worker with every other. A new view makes new ones, so that nothing late arrives.

Everything that waits here can be woken: `abort`, from any thread, shuts the sockets down.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable, Iterator

from shoal.parallel.links import frames
from shoal.parallel.links.endpoint import Endpoint, reach
from shoal.parallel.links.frames import Frame
from shoal.parallel.links.link import Arrange, Link, PeerError
from shoal.spec.view import Address, View
from shoal.wire.handshake import LinkError

PATIENCE_S = 1.0
_PAUSE_S = 0.02


class Mesh:
    """Made and used by the loop's thread; `abort` may come from any.

    When something fails, a LinkError says what; the mesh is of no use then, and peers are told whom to blame.
    """

    def __init__(self, view: View, seat: int, *, endpoint: Endpoint, token: str) -> None:
        self.view = view.number
        self.seat = seat
        self.links: dict[int, Link] = {}
        self._addresses = view.addresses
        self._peers = [peer for peer in sorted(view.carries) if peer != seat]
        self._endpoint = endpoint
        self._token = token
        self._aborted = threading.Event()
        self._guard = threading.Lock()
        self._unreached: PeerError | None = None

    def connect(self) -> None:
        """Call those with a lower seat, be called by those with a higher one. Returns when all have come so far."""
        self._endpoint.forget_before(self.view)
        for peer in self._peers:
            if peer < self.seat:
                threading.Thread(
                    target=self._call, args=(peer, self._addresses[peer]), name="shoal-call", daemon=True
                ).start()
        socks = self._endpoint.take(self.view, self._peers, given_up=self._hopeless)
        if socks is None:
            raise self._unreached if self._unreached and not self._aborted.is_set() else self._abortion()
        with self._guard:
            self.links = {peer: Link(peer, sock, view=self.view) for peer, sock in socks.items()}
            if self._aborted.is_set():
                self._shut()
        for link in self.links.values():
            link.post(Frame(frames.HERE, self.view, 0, self.seat))
        self.trade(frames.HERE, 0, lambda link, frame: [])

    def _call(self, peer: int, address: Address) -> None:
        """In a thread of its own, for connecting may take seconds, and an abort does not wait for it."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                sock = reach(address, self._token, purpose="mesh", seat=self.seat, view=self.view)
                break
            except LinkError as failure:
                if self._aborted.wait(_PAUSE_S) or time.monotonic() > deadline:
                    self._unreached = PeerError(peer, f"was not reached: {failure}")
                    self._endpoint.wake()
                    return
        try:
            self._endpoint.park(self.view, peer, sock)
        except LinkError:
            sock.close()  # meanwhile another view counts

    def _hopeless(self) -> bool:
        return self._aborted.is_set() or self._unreached is not None

    def frame(self, kind: int, step: int, *, flags: int = 0, size: int = 0, filled: int = 0) -> Frame:
        return Frame(kind, self.view, step, self.seat, flags, size, filled)

    @property
    def far(self) -> list[Link]:
        """To those with whom no memory is shared."""
        return [link for link in self.links.values() if not link.same_host]

    def trade(self, kind: int, step: int, arrange: Arrange, *, progress: Callable[[], None] | None = None) -> float:
        """Send what was posted and receive one frame from every peer, all at once, so that nobody waits in a circle.

        `progress` is called whenever something has moved. Returns the seconds in which nothing did, because peers had
        not begun. Between `open` and `finish`, which this is, one may `advance`.
        """
        self.open(kind, step)
        return self.finish(arrange, progress)

    def open(self, kind: int, step: int) -> None:
        for link in self.links.values():
            link.expect(kind, step)

    def advance(self, arrange: Arrange, progress: Callable[[], None] | None = None) -> None:
        """What can be sent and received at this moment."""
        with self._leaving_if_it_fails():
            for link in self.links.values():
                link.send()
                link.receive(arrange)
            if progress:
                progress()

    def finish(self, arrange: Arrange, progress: Callable[[], None] | None = None) -> float:
        with self._leaving_if_it_fails():
            return self._trade(arrange, progress)

    @contextlib.contextmanager
    def _leaving_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except LinkError as failure:
            if self._aborted.is_set():  # which explains whatever came after it
                raise self._abortion() from failure
            self.part(failure.seat if isinstance(failure, PeerError) else self.seat)
            raise

    def _trade(self, arrange: Arrange, progress: Callable[[], None] | None) -> float:
        poll = select.poll()
        busy: dict[int, Link] = {}
        for link in self.links.values():
            link.send()
            if not _wishes(link):
                continue
            busy[link.fileno()] = link
            poll.register(link, _wishes(link))
        if progress:
            progress()
        waited_s = 0.0
        while busy:
            idle = not any(link.sending or link.began for link in busy.values())
            start = time.perf_counter()
            happened = poll.poll()
            if idle:
                waited_s += time.perf_counter() - start
            for fd, _ in happened:
                link = busy[fd]
                if link.sending:
                    link.send()
                if link.receiving:
                    link.receive(arrange)
                if wishes := _wishes(link):
                    poll.modify(fd, wishes)
                else:
                    poll.unregister(fd)
                    del busy[fd]
            if progress:
                progress()
        return waited_s

    def _abortion(self) -> LinkError:
        return LinkError(f"view {self.view} was aborted")

    def part(self, blamed: int) -> None:
        """Leave, and tell the others because of whom."""
        for link in self.links.values():
            link.part(Frame(frames.LEFT, self.view, blamed, self.seat))

    @property
    def bytes_sent(self) -> int:
        return sum(link.bytes_sent for link in self.links.values())

    @property
    def moved_bytes(self) -> int:
        """Sent and received. From any thread."""
        return sum(link.bytes_sent + link.bytes_received for link in list(self.links.values()))

    def abort(self) -> None:
        """Whoever waits comes back with a LinkError, now and ever after."""
        self._aborted.set()
        self._endpoint.wake()
        with self._guard:
            self._shut()

    def _shut(self) -> None:
        for link in self.links.values():
            link.shut()

    def close(self) -> None:
        with self._guard:
            self._shut()
            for link in self.links.values():
                link.close()
            self.links = {}


def _wishes(link: Link) -> int:
    return (select.POLLIN if link.receiving else 0) | (select.POLLOUT if link.sending else 0)
