"""A newcomer's replica, brought up to where the others are while they go on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from shoal.events import Event
from shoal.parallel.feeding import Following, total_of
from shoal.parallel.local.replica import LocalReplica
from shoal.parallel.sync.base import Discarded
from shoal.spec.view import View
from shoal.wire.handshake import LinkError

if TYPE_CHECKING:
    from shoal.train.loop import Loop

LOOK_UP_S = 0.05


class Followed:
    """Belongs to the training thread. Without a connection it does nothing, and says so."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._link: Following | None = None

    def begin(self, view: View, seat: int) -> bool:
        assert view.source is not None
        self.close()
        loop = self._loop
        found = loop.peers.follow(view.addresses[view.source], seat, view=view.number, most_bytes=loop.most_bytes)
        self._link = None if isinstance(found, Discarded) else found
        return self._link is not None

    def advance(self) -> bool | None:
        """Take what came within a moment: True when that was all there is so far, None when nothing more comes."""
        if self._link is None:
            return None
        if not self._link.ready(LOOK_UP_S):
            return False
        try:
            return self._apply(self._link.take())
        except LinkError:
            self.close()
            return None

    def reach(self, position: int) -> bool:
        """Go on to this position; False if that is not possible, and the whole state is needed."""
        while self._link is not None and (self._loop.position or 0) < position:
            if self.advance() is None:
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
            if not isinstance(replica, LocalReplica) or not loop.step < step < loop.course.after(loop.step):
                raise LinkError(f"a fragment of step {step} after {loop.step}")
            replica.arrive(entry["which"], [change.to(replica.device) for change in entry["changes"]])
        elif entry["kind"] == "step":
            if entry["step"] != loop.step:
                raise LinkError(f"step {entry['step']} after {loop.step}")
            samples = loop.count(loop.replica.apply(loop.step, total_of(entry, loop.replica.device)))
            loop.progress.show(loop.step, loss=loop.loss, lr=loop.replica.lr, samples=samples)
        else:
            fields = {"part": "validation", "metrics": entry["metrics"], "evaluation_s": 0.0}
            loop.teller.show(Event("evaluated", time.time(), loop.teller.stream.who, loop.step, fields))
            loop.learn_from(entry["metrics"])
        return False

    def close(self) -> None:
        """Stay at the last commit: fragments that came since it count for those alone who see the next."""
        if self._link is not None:
            self._link.close()
            self._link = None
            if isinstance(self._loop.replica, LocalReplica):
                self._loop.replica.undo()
