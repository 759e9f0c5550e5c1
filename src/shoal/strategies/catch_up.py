"""The new worker's side of the state stream: a copy of the source's state, then every change since."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shoal.collectives.outcome import Discarded
from shoal.collectives.peer_services import PeerServices
from shoal.collectives.state_stream import StateSubscription
from shoal.net.errors import LinkError
from shoal.spec.view import View
from shoal.strategies.context import RunProgress

POLL_S = 0.05
SILENCE_S = 0.5
"""Seconds without an entry after which a worker that enters a view gives up the stream. A source that stands still
sends nothing, and waits for this worker. It waits longer than this."""


class CatchUp:
    """Belongs to the training thread. Without a connection there is no stream: `poll` returns None.

    `apply` applies an entry of the stream to the weights and the progress, or raises LinkError if it does not fit.
    `settle` is called when the connection ends, to go back to the last commit.
    """

    def __init__(
        self,
        peers: PeerServices,
        progress: RunProgress,
        *,
        apply: Callable[[Mapping[str, Any]], None],
        settle: Callable[[], None],
    ) -> None:
        self._peers = peers
        self._progress = progress
        self._apply = apply
        self._settle = settle
        self._stream: StateSubscription | None = None

    def connect(self, view: View, seat: int, *, max_bytes: int) -> bool:
        """Subscribe to the view's source. False if that fails."""
        assert view.source is not None
        self.close()
        found = self._peers.subscribe(view.addresses[view.source], seat, view=view.number, max_bytes=max_bytes)
        self._stream = None if isinstance(found, Discarded) else found
        return self._stream is not None

    def poll(self) -> bool | None:
        """Wait briefly for an entry and apply it. True if this worker has everything so far, None at the end."""
        if self._stream is None:
            return None
        if not self._stream.ready(POLL_S):
            return False
        try:
            entry = self._stream.receive()
            if entry["kind"] == "current":
                return True
            self._apply(entry)
        except LinkError:
            self.close()
            return None
        return False

    def advance_to(self, position: int) -> bool:
        """Follow the stream to this position. False if that fails, or if the source is silent: then this worker needs
        the whole state."""
        while self._stream is not None and (self._progress.position or 0) < position:
            if not self._stream.ready(SILENCE_S) or self.poll() is None:
                break
        self.close()
        return self._progress.position == position

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
            self._settle()
