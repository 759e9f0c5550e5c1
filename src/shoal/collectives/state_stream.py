"""How a new worker catches up while the others train: a copy of the state, then every total applied since.

Applying a total gives the same bits on every worker, so a subscriber reaches the others' state without computing a
lane. Entries that it cannot receive fast enough wait in the source's memory up to a limit. Beyond the limit the source
disconnects it, and it fetches the whole state when it enters.
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
from shoal.lanes.flat_layout import FlatLayout
from shoal.lanes.lane_sum import LaneSum
from shoal.net.errors import LinkError

MAX_QUEUED_BYTES = 1 << 30
"""Bytes that may wait for one subscriber before the source disconnects it."""
MAX_SUBSCRIBERS = 64
"""Each has a copy of the state in the source's memory."""
STALL_TIMEOUT_S = 10.0
"""Seconds without a byte in the middle of an entry after which a subscriber gives up: a source that froze or was cut
off would keep it from every later view."""
CAUGHT_UP = {"kind": "current"}
ENTRY_FIELDS: Mapping[str, Mapping[str, type]] = {
    "current": {},
    "state": {"state": dict},
    "step": {"step": int, "total": dict},
    "fragment": {"step": int, "which": list, "changes": list},
    "evaluated": {"metrics": dict},
}
"""The fields of an entry, by its kind."""


class StreamSubscriber:
    """The queue of entries for one new worker. The training thread fills it, the caller's thread empties it."""

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
        """The next entry; None if the queue is empty, LinkError if it is closed."""
        with self.changed:
            if self.closed:
                raise LinkError("the stream is closed")
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
    """The source's side. `serve` runs in one thread per subscriber; everything else belongs to the training thread."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._subscribers: list[StreamSubscriber] = []

    @property
    def active(self) -> bool:
        return bool(self._subscribers)

    def serve(self, sock: socket.socket) -> None:
        """Send the queued entries, send CAUGHT_UP when the queue is empty, and wait for more. LinkError if there are
        too many subscribers."""
        subscriber = StreamSubscriber()
        with self._guard:
            if len(self._subscribers) >= MAX_SUBSCRIBERS:
                raise LinkError(f"{MAX_SUBSCRIBERS} workers follow this one")
            self._subscribers.append(subscriber)
        try:
            with contextlib.suppress(LinkError):
                while True:
                    entry = subscriber.pop()
                    if entry is not None:
                        send_state(sock, entry)
                        if not subscriber.queue:
                            send_state(sock, CAUGHT_UP)
                    subscriber.wait()
        finally:
            with self._guard:
                self._subscribers.remove(subscriber)

    def start_subscribers(self, state: Callable[[], State]) -> None:
        """Called between two steps: new subscribers get a copy of the current state."""
        for subscriber in self._unstarted():
            copied, size_bytes = _copy(state())
            subscriber.started = True
            subscriber.put({"kind": "state", "state": copied}, size_bytes)

    def _unstarted(self) -> list[StreamSubscriber]:
        with self._guard:
            return [subscriber for subscriber in self._subscribers if not subscriber.started]

    def publish(self, entry: Mapping[str, Any]) -> None:
        """Queue a change of the state for all started subscribers."""
        with self._guard:
            started = [subscriber for subscriber in self._subscribers if subscriber.started]
        if started:
            copied, size_bytes = _copy(dict(entry))
            for subscriber in started:
                subscriber.put(copied, size_bytes)

    def publish_total(self, step: int, total: LaneSum) -> None:
        """Publish the sum that is about to be applied at a step."""
        if self._subscribers:
            self.publish({"kind": "step", "step": step, "total": _entry_from_total(total)})

    def publish_fragment(self, step: int, param_indices: list[int], changes: list[Tensor]) -> None:
        """Publish the fragment that is about to be merged before a step of local SGD."""
        if self._subscribers:
            self.publish({"kind": "fragment", "step": step, "which": param_indices, "changes": list(changes)})

    def drop_subscribers(self) -> None:
        """Disconnect all subscribers: the state has changed in a way that was not published."""
        with self._guard:
            for subscriber in self._subscribers:
                subscriber.close()


class StateSubscription:
    """The new worker's side of the connection."""

    def __init__(self, sock: socket.socket, *, max_bytes: int) -> None:
        self.sock = sock
        self.sock.settimeout(STALL_TIMEOUT_S)
        self._max_bytes = max_bytes

    def ready(self, timeout_s: float) -> bool:
        """Whether an entry has arrived."""
        return bool(select.select([self.sock], [], [], timeout_s)[0])

    def receive(self) -> dict[str, Any]:
        """The next entry; LinkError if the stream has ended or stalls, or if it is no entry."""
        entry: Any = receive_state(self.sock, max_bytes=self._max_bytes)
        kind = entry.get("kind") if isinstance(entry, dict) else None
        fields = ENTRY_FIELDS.get(kind) if isinstance(kind, str) else None
        if fields is None or not all(isinstance(entry.get(name), type_) for name, type_ in fields.items()):
            raise LinkError(f"sent something that is no stream entry: {kind!r:.40}")
        return dict(entry)

    def close(self) -> None:
        self.sock.close()


def total_from_entry(entry: Mapping[str, Any], layout: FlatLayout, device: torch.device) -> LaneSum:
    """The sum in an entry, on the replica's device. LinkError if it is not a sum of this layout."""
    try:
        total = _lane_sum(entry["total"], device)
        fits = layout.fits(total)
    except (AttributeError, KeyError, TypeError) as failure:
        raise LinkError(f"sent something that is no sum: {failure!r:.200}") from failure
    if not fits:
        raise LinkError("sent a sum of other shapes")
    return total


def _lane_sum(total: Mapping[str, Any], device: torch.device) -> LaneSum:

    def here(tensors: list[Tensor]) -> list[Tensor]:
        return [tensor.to(device) for tensor in tensors]

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
    """A copy of the state with its own tensors in host memory, and their size in bytes."""
    tensors, skeleton = flatten(state)
    copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    return unflatten(copies, skeleton), sum(t.numel() * t.element_size() for t in copies.values())
