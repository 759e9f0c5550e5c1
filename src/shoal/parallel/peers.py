"""This worker among the others: where they reach it, and how it gets at what they hold."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterable
from typing import Any

from shoal.checkpoint.tree import State
from shoal.parallel import memories
from shoal.parallel.feeding import Feeder, Following
from shoal.parallel.links.endpoint import Endpoint, reach
from shoal.parallel.links.pace import LinkPace, answer_pace, link_pace
from shoal.parallel.memories import Memories, Remembered
from shoal.parallel.state_door import StateDoor, fetch
from shoal.parallel.sync.base import Discarded
from shoal.spec.view import Address, View
from shoal.wire.handshake import LinkError

PACE_S = 10.0
"""Whoever stands still for so long while a link is measured need not be measured."""


class Peers:
    """Used by the training thread; `abort` may come from any."""

    def __init__(self, token: str, *, bind: str) -> None:
        self.token = token
        self.door = StateDoor()
        self.feeder = Feeder()
        self.memories = Memories()
        self.endpoint = Endpoint(token, bind=bind, serve=self._serve)
        self._lock = threading.Lock()
        self._fetching: socket.socket | None = None
        self._aborted = 0

    def _serve(self, sock: socket.socket, hello: dict[str, Any]) -> None:
        if hello["purpose"] == "follow":
            self.feeder.serve(sock)
        elif hello["purpose"] == "memory":
            self.memories.serve(sock, hello)
        elif hello["purpose"] == "pace":
            answer_pace(sock)
        else:
            self.door.serve(sock, hello)

    def follow(self, address: Address, seat: int, *, view: int, most_bytes: int) -> Following | Discarded:
        """Be fed by a peer that goes on training."""
        try:
            return Following(reach(address, self.token, purpose="follow", seat=seat, view=view), most_bytes=most_bytes)
        except LinkError as failure:
            return Discarded(str(failure))

    def pace(self, view: View, seat: int) -> LinkPace | None:
        """Of the link to the view's source, if that is on another host; None if it is not, or could not be measured."""
        assert view.source is not None
        address = view.addresses[view.source]
        if address.host_id == self.endpoint.address.host_id:
            return None
        try:
            with reach(address, self.token, purpose="pace", seat=seat, view=view.number) as sock:
                self._opened(sock, view.number)
                sock.settimeout(PACE_S)
                return link_pace(sock)
        except LinkError:
            return None
        finally:
            with self._lock:
                self._fetching = None

    def fetch(self, view: View, seat: int, *, most_bytes: int) -> State | Discarded:
        """The state of the view's source."""
        assert view.source is not None
        try:
            return fetch(
                view.addresses[view.source],
                self.token,
                seat=seat,
                view=view.number,
                most_bytes=most_bytes,
                call=reach,
                opened=lambda sock: self._opened(sock, view.number),
            )
        except LinkError as failure:
            return Discarded(f"no state from worker-{view.source}: {failure}")
        finally:
            with self._lock:
                self._fetching = None

    def recall(
        self, view: View, seat: int, *, source: int, step: int, lanes: Iterable[int], floats: int
    ) -> Remembered | Discarded:
        """What a peer knows of what these lanes remember at a step."""
        wanted = sorted(lanes)
        try:
            address, call = view.addresses[source], {"step": step, "lanes": wanted}
            with reach(address, self.token, purpose="memory", seat=seat, view=view.number, **call) as sock:
                self._opened(sock, view.number)
                return memories.receive(sock, step=step, lanes=wanted, floats=floats)
        except LinkError as failure:
            return Discarded(f"no memory from worker-{source}: {failure}")
        finally:
            with self._lock:
                self._fetching = None

    def _opened(self, sock: socket.socket, view: int) -> None:
        with self._lock:
            self._fetching = sock
            if self._aborted >= view:
                raise LinkError("asked to stop")

    def abort(self, view: int) -> None:
        """Whoever fetches for this view, or an older one, gives up."""
        with self._lock:
            self._aborted = max(self._aborted, view)
            if self._fetching is not None:
                with contextlib.suppress(OSError):
                    self._fetching.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.feeder.reset()
        self.door.close()
        self.endpoint.close()

    def facts(self) -> dict[str, Any]:
        return {"refused": self.endpoint.refused, "served_bytes": self.door.served_bytes}
