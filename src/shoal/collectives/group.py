"""The members of the present view and the connections to them: the base of everything that workers do together."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

from shoal.collectives.outcome import Discarded
from shoal.collectives.transport import frames
from shoal.collectives.transport.connection import PeerLink
from shoal.collectives.transport.endpoint import Endpoint
from shoal.collectives.transport.frames import PeerFrame
from shoal.collectives.transport.mesh import Mesh
from shoal.net.errors import LinkError
from shoal.spec.view import View

MAX_GATHERED_BYTES = 1 << 30
_NUMBER_BITS = 56


class Channel(enum.IntEnum):
    """What a gather is for. With a number, usually step or view, it makes the label that all members share."""

    RENDEZVOUS = 1
    STEP_HEADER = 2
    VOTE = 3
    BARRIER = 4
    VALIDATION = 5
    TEST = 6
    VALIDATION_RESULT = 7
    TEST_RESULT = 8
    END = 9
    HELD_SHARDS = 10
    SHARD_SPECS = 11
    CHECKPOINT_READ = 12
    SAVE_BEGIN = 13
    SAVE_PIECES = 14
    LEAVE_VIEW = 15
    SELF_CHECK = 16
    CARRY = 17

    def label(self, number: int) -> int:
        return self << _NUMBER_BITS | number


class ViewGroup:
    """Used by the training thread; `abort`, `aborted` and `moved_bytes` by any thread.

    A single worker that carries all lanes has no peers: `mesh` is None, and no `endpoint` is needed. The thread that
    aborts the present view calls every function in `on_abort`, to wake other waiting threads.
    """

    def __init__(self, endpoint: Endpoint | None = None, token: str = "") -> None:
        self.view: View | None = None
        self.seat = 0
        self.mesh: Mesh | None = None
        self.on_abort: list[Callable[[], None]] = []
        self._endpoint = endpoint
        self.tls_contexts = endpoint.tls_contexts if endpoint else None
        self._token = token
        self._broken = ""
        self._guard = threading.Lock()
        self._aborted = 0  # and all views before it

    def enter(self, view: View, seat: int) -> Discarded | None:
        """Switch to another view. Returns when all its members are connected; Discarded if that fails."""
        self.leave()
        if seat not in view.carries or (len(view.carries) > 1 and self._endpoint is None):
            raise ValueError(f"view {view.number} is not for seat {seat}")
        mesh = None
        if self._endpoint and len(view.carries) > 1:
            mesh = Mesh(view, seat, endpoint=self._endpoint, token=self._token)
        with self._guard:
            self.view, self.seat, self.mesh = view, seat, mesh
            self._broken = f"view {view.number} was aborted" if self.aborted() else ""
        if mesh and not self._broken:
            try:
                mesh.connect()
            except LinkError as failure:
                self._broken = str(failure)
        return Discarded(self._broken) if self._broken else None

    @property
    def broken(self) -> str:
        """Why this view has failed, or ''."""
        return self._broken or ("aborted" if self.aborted() else "")

    def discard(self, failure: LinkError) -> Discarded:
        """Turn a failure into Discarded, and end this view."""
        self._broken = str(failure)
        return Discarded(self._broken)

    def gather(self, label: int, content: bytes) -> dict[int, bytes] | Discarded:
        """Every member's content, by seat. Members make the same calls in the same order; the label proves it."""
        if len(content) > MAX_GATHERED_BYTES:
            raise ValueError(f"{len(content)} bytes to gather, and {MAX_GATHERED_BYTES} is the most")
        if self.broken:
            return Discarded(self.broken)
        if self.mesh is None:
            return {self.seat: content}
        came: dict[int, bytearray] = {}

        def arrange(link: PeerLink, frame: PeerFrame) -> list[memoryview]:
            if frame.size > MAX_GATHERED_BYTES:
                raise LinkError(f"sends {frame.size} bytes, and {MAX_GATHERED_BYTES} is the most")
            came[link.seat] = bytearray(frame.size)
            return [memoryview(came[link.seat])]

        frame = PeerFrame(frames.GATHER, self.mesh.view, label, self.seat, size=len(content))
        for link in self.mesh.links.values():
            link.post(frame, [memoryview(content)])
        try:
            self.mesh.exchange(frames.GATHER, label, arrange)
        except LinkError as failure:
            return self.discard(failure)
        found = {seat: bytes(buffer) for seat, buffer in came.items()} | {self.seat: content}
        return dict(sorted(found.items()))

    def abort(self, view: int) -> None:
        """Threads that wait for members of this view, or of an older one, return within milliseconds, and later calls
        do not wait. Newer views are not affected."""
        with self._guard:
            self._aborted = max(self._aborted, view)
            mesh = self.mesh
        if mesh and mesh.view <= view:
            mesh.abort()
        if self.aborted():
            for wake in self.on_abort:
                wake()

    def abort_present_view(self) -> None:
        if self.view:
            self.abort(self.view.number)

    def aborted(self) -> bool:
        """Was the present view aborted?"""
        return self.view is not None and self.view.number <= self._aborted

    def moved_bytes(self) -> int:
        """A number that grows as long as data moves between this worker and other members. A new view may lower it."""
        mesh = self.mesh
        return mesh.moved_bytes if mesh else 0

    def leave(self) -> None:
        with self._guard:
            mesh, self.mesh = self.mesh, None
        if mesh:
            mesh.close()
