"""A newcomer's replica, brought up to where the others are while they go on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from shoal.collectives.outcome import Discarded
from shoal.collectives.state_stream import StateSubscription, total_from_entry
from shoal.events import Event
from shoal.net.errors import LinkError
from shoal.spec.view import View
from shoal.strategies.local_sgd.replica import LocalReplica

if TYPE_CHECKING:
    from shoal.train.loop import Loop

POLL_S = 0.05


class CatchUp:
    """Belongs to the training thread. Without a connection it does nothing, and says so."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._stream: StateSubscription | None = None

    def connect(self, view: View, seat: int) -> bool:
        assert view.source is not None
        self.close()
        loop = self._loop
        found = loop.peers.subscribe(
            view.addresses[view.source], seat, view=view.number, max_bytes=loop.max_state_bytes
        )
        self._stream = None if isinstance(found, Discarded) else found
        return self._stream is not None

    def poll(self) -> bool | None:
        """Take what came within a moment: True when that was all there is so far, None when nothing more comes."""
        if self._stream is None:
            return None
        if not self._stream.ready(POLL_S):
            return False
        try:
            return self._apply(self._stream.receive())
        except LinkError:
            self.close()
            return None

    def advance_to(self, position: int) -> bool:
        """Go on to this position; False if that is not possible, and the whole state is needed."""
        while self._stream is not None and (self._loop.position or 0) < position:
            if self.poll() is None:
                break
        self.close()
        return self._loop.position == position

    def _apply(self, entry: dict[str, Any]) -> bool:
        loop = self._loop
        if entry["kind"] == "current":
            return True
        if entry["kind"] == "state":
            if entry["state"]["loop"]["task"] is not None:
                raise LinkError("a task that remembers cannot be followed")
            loop.load_state(entry["state"])
        elif entry["kind"] == "fragment":
            replica, step = loop.replica, entry["step"]
            if not isinstance(replica, LocalReplica) or not loop.step < step < loop.train_schedule.next_commit(
                loop.step
            ):
                raise LinkError(f"a fragment of step {step} after {loop.step}")
            replica.apply_fragment(entry["which"], [change.to(replica.device) for change in entry["changes"]])
        elif entry["kind"] == "step":
            if entry["step"] != loop.step:
                raise LinkError(f"step {entry['step']} after {loop.step}")
            samples = loop.advance_step(loop.replica.apply(loop.step, total_from_entry(entry, loop.replica.device)))
            loop.stats.notify_watchers(loop.step, loss=loop.loss, lr=loop.replica.lr, samples=samples)
        else:
            fields = {"part": "validation", "metrics": entry["metrics"], "evaluation_s": 0.0}
            loop.reporter.notify_watchers(Event("evaluated", time.time(), loop.reporter.stream.who, loop.step, fields))
            loop.record_evaluation(entry["metrics"])
        return False

    def close(self) -> None:
        """Stay at the last commit: fragments that came since it count for those alone who see the next."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
            if isinstance(self._loop.replica, LocalReplica):
                self._loop.replica.undo_step()
