"""How a newcomer catches up while the others go on: a copy of the state, then every total that was applied since.

Applying a total gives the same bits everywhere, so a follower comes to hold what the others hold without computing a
lane. What it cannot take in fast enough waits in the source's memory up to a limit; beyond that it is cut off, and
gets the whole state when it enters.
"""

from __future__ import annotations

import collections
import contextlib
import select
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.state_format import receive_state, send_state
from shoal.checkpoint.state_tree import State, flatten, unflatten
from shoal.lanes.replica import LaneSum
from shoal.net.errors import LinkError

MAX_QUEUED_BYTES = 1 << 30
CAUGHT_UP = {"kind": "current"}


class StreamSubscriber:
    """What one newcomer has still to be sent. Filled by the training thread, emptied by the caller's."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queue: collections.deque[tuple[State, int]] = collections.deque()
        self.queued_bytes = 0
        self.started = self.closed = False

    def put(self, entry: State, size_bytes: int) -> None:
        with self.changed:
            self.queue.append((entry, size_bytes))
            self.queued_bytes += size_bytes
            self.closed = self.closed or self.queued_bytes > MAX_QUEUED_BYTES
            self.changed.notify()

    def pop(self) -> State | None:
        """The next entry; None when there is none at the moment, LinkError when there will be none."""
        with self.changed:
            if self.closed:
                raise LinkError("it does not follow any more")
            if not self.queue:
                return None
            entry, size_bytes = self.queue.popleft()
            self.queued_bytes -= size_bytes
            return entry

    def wait(self) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.queue or self.closed)

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify()


class StatePublisher:
    """The source's side. `serve` runs in a thread per newcomer; everything else belongs to the training thread."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._subscribers: list[StreamSubscriber] = []

    @property
    def active(self) -> bool:
        return bool(self._subscribers)

    def serve(self, sock: socket.socket) -> None:
        """Send what there is, say when the newcomer has all of it, and wait for more."""
        follower = StreamSubscriber()
        with self._guard:
            self._subscribers.append(follower)
        try:
            with contextlib.suppress(LinkError):
                while True:
                    entry = follower.pop()
                    if entry is not None:
                        send_state(sock, entry)
                        if not follower.queue:
                            send_state(sock, CAUGHT_UP)
                    follower.wait()
        finally:
            with self._guard:
                self._subscribers.remove(follower)

    def start_subscribers(self, state: Callable[[], State]) -> None:
        """Between two steps: newcomers get a copy of the state as it is now."""
        for follower in self._unstarted():
            copied, size_bytes = _copy(state())
            follower.started = True
            follower.put({"kind": "state", "state": copied}, size_bytes)

    def _unstarted(self) -> list[StreamSubscriber]:
        with self._guard:
            return [follower for follower in self._subscribers if not follower.started]

    def publish(self, entry: Mapping[str, Any]) -> None:
        """What changed the state since."""
        with self._guard:
            begun = [follower for follower in self._subscribers if follower.started]
        if begun:
            copied, size_bytes = _copy(dict(entry))
            for follower in begun:
                follower.put(copied, size_bytes)

    def publish_total(self, step: int, total: LaneSum) -> None:
        """The sum that is about to be applied at a step."""
        if self._subscribers:
            self.publish({"kind": "step", "step": step, "total": _entry_from_total(total)})

    def publish_fragment(self, step: int, param_indices: list[int], changes: list[Tensor]) -> None:
        """What is about to arrive before a step, where lanes train by themselves."""
        if self._subscribers:
            self.publish({"kind": "fragment", "step": step, "which": param_indices, "changes": list(changes)})

    def drop_subscribers(self) -> None:
        """The state has changed by something that was not noted."""
        with self._guard:
            for follower in self._subscribers:
                follower.close()


class StateSubscription:
    """The newcomer's side of the connection."""

    def __init__(self, sock: socket.socket, *, max_bytes: int) -> None:
        self.sock = sock
        self._max_bytes = max_bytes

    def ready(self, timeout_s: float) -> bool:
        """Is there something to take?"""
        return bool(select.select([self.sock], [], [], timeout_s)[0])

    def receive(self) -> dict[str, Any]:
        """The next entry; LinkError when there will be none."""
        entry = receive_state(self.sock, max_bytes=self._max_bytes)
        if not isinstance(entry, dict) or "kind" not in entry:
            raise LinkError("not an entry")
        return entry

    def close(self) -> None:
        self.sock.close()


def total_from_entry(entry: Mapping[str, Any], device: torch.device) -> LaneSum:
    """The sum in an entry, where the replica is."""

    def here(tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.to(device) for tensor in tensors]

    total = entry["total"]
    count = total["count"]
    return LaneSum(
        here(total["grads"]),
        here(total["averaged"]),
        here(total["first"]),
        total["loss"].to(device),
        None if count is None else count.to(device),
    )


def _entry_from_total(total: LaneSum) -> dict[str, Any]:
    return {
        "grads": list(total.grads),
        "averaged": list(total.float_buffers),
        "first": list(total.int_buffers),
        "loss": total.loss,
        "count": total.count,
    }


def _copy(state: State) -> tuple[State, int]:
    """The same with tensors of its own on the host, and their size."""
    tensors, skeleton = flatten(state)
    copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    return unflatten(copies, skeleton), sum(t.numel() * t.element_size() for t in copies.values())
