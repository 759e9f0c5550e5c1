"""The members of the present view and the connections to them: what sync objects have in common."""

from __future__ import annotations

import threading

from shoal.collectives.outcome import Discarded
from shoal.collectives.transport import frames
from shoal.collectives.transport.connection import PeerLink
from shoal.collectives.transport.endpoint import Endpoint
from shoal.collectives.transport.frames import PeerFrame
from shoal.collectives.transport.mesh import Mesh
from shoal.net.errors import LinkError
from shoal.spec.view import View

MAX_GATHERED_BYTES = 1 << 30


class ViewGroup:
    """Used by the loop's thread; `abort` and `aborted` by any.

    With one worker that carries all lanes there is nobody to talk to: `mesh` is None, and no `endpoint` is needed.
    """

    def __init__(self, endpoint: Endpoint | None, token: str) -> None:
        self.view: View | None = None
        self.seat = 0
        self.mesh: Mesh | None = None
        self._endpoint = endpoint
        self._token = token
        self._broken = ""
        self._guard = threading.Lock()
        self._aborted = 0  # and all views before it

    def enter(self, view: View, seat: int) -> str:
        """Another view. Returns '' when all its members have come, or why that failed."""
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
        return self._broken

    @property
    def broken(self) -> str:
        """Why these members cannot do anything together any more."""
        return self._broken or ("aborted" if self.aborted() else "")

    def discard(self, failure: LinkError) -> Discarded:
        """It failed, and nothing more comes of this view."""
        self._broken = str(failure)
        return Discarded(self._broken)

    def gather(self, label: int, content: bytes) -> dict[int, bytes] | Discarded:
        """See Sync."""
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
        """See Sync."""
        with self._guard:
            self._aborted = max(self._aborted, view)
            mesh = self.mesh
        if mesh and mesh.view <= view:
            mesh.abort()

    def aborted(self) -> bool:
        return self.view is not None and self.view.number <= self._aborted

    @property
    def moved_bytes(self) -> int:
        """See Sync."""
        mesh = self.mesh
        return mesh.moved_bytes if mesh else 0

    def leave(self) -> None:
        with self._guard:
            mesh, self.mesh = self.mesh, None
        if mesh:
            mesh.close()
