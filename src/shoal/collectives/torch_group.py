"""A process group of torch's that one can walk away from.

Nothing wakes a thread that waits inside gloo, neither `abort` nor `shutdown`. So the group lives in a thread of its
own, from the first connection to the last: whoever asks for something waits for an answer, and that wait can be ended.
Nothing global remains, neither a default group nor an environment variable.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, InvalidStateError
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import TCPStore

from shoal.collectives.group import Channel, ViewGroup
from shoal.collectives.outcome import Discarded
from shoal.net.errors import LinkError

RENDEZVOUS_TIMEOUT = timedelta(seconds=30)
OPERATION_TIMEOUT = timedelta(minutes=10)
"""Nobody waits so long: it is when a group that was left alone gives up."""

TorchGroup = Any  # torch's own: ProcessGroupGloo or ProcessGroupNCCL
GroupOperation = Callable[[TorchGroup], None]
_PORT = struct.Struct("<H")


@dataclass(frozen=True)
class Rendezvous:
    """Of `size` members, this is number `rank`. They meet at `port` of `host`, where number 0 has the `listener`;
    `own_host` is the address at which this one can be reached."""

    rank: int
    size: int
    host: str
    port: int
    own_host: str
    listener: socket.socket | None = None

    def connect(self) -> TCPStore:
        """The store in which members find each other; member 0 keeps it."""
        listens: dict[str, Any] = {"is_master": False}
        if self.listener:
            listens = {"is_master": True, "master_listen_fd": os.dup(self.listener.fileno())}  # the store closes it
        return TCPStore(
            self.host, self.port, wait_for_workers=False, timeout=RENDEZVOUS_TIMEOUT, multi_tenant=False, **listens
        )


@contextlib.contextmanager
def rendezvous(group: ViewGroup, ranks: Mapping[int, int]) -> Iterator[Rendezvous]:
    """Where the members of the present view meet for a torch group, by their ranks. LinkError if one is lost."""
    assert group.view is not None
    view, seat = group.view, group.seat
    first, host = min(ranks, key=ranks.__getitem__), view.addresses[seat].host
    listener = None
    if seat == first:
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        port = _PORT.pack(listener.getsockname()[1] if listener else 0)
        ports = group.gather(Channel.RENDEZVOUS.label(view.number), port)
        if isinstance(ports, Discarded):
            raise LinkError(ports.why)
        (port_there,) = _PORT.unpack(ports[first])
        yield Rendezvous(ranks[seat], len(ranks), view.addresses[first].host, port_there, host, listener)
    finally:
        if listener:
            listener.close()


class AbortableProcessGroup:
    """`ask` is for one thread, `leave` for any."""

    def __init__(self, backend: str, rendezvous: Rendezvous, device: torch.device) -> None:
        self._backend = backend
        self._device = device
        self._group: TorchGroup = None
        self._queue: queue.SimpleQueue[tuple[GroupOperation, Future[None]] | None] = queue.SimpleQueue()
        self._guard = threading.Lock()
        self._pending: Future[None] | None = None
        self._left = False
        self._thread = threading.Thread(target=self._run_thread, args=(rendezvous,), name="shoal-circle", daemon=True)
        self._thread.start()

    def run(self, operation: GroupOperation) -> None:
        """Let the circle's thread do this with the group. LinkError if it fails, or when this member leaves."""
        answer: Future[None] = Future()
        with self._guard:
            if not self._left:
                self._pending = answer
                self._queue.put((operation, answer))
        try:
            if self._left:
                raise CancelledError
            answer.result()
        except CancelledError:
            raise LinkError("this worker left the circle") from None

    def leave(self) -> None:
        """Whoever waits is woken. The connections are closed as soon as the circle's thread is done with what it does;
        that lets the other members know."""
        with self._guard:
            self._left = True
            self._queue.put(None)
            if self._pending:
                self._pending.cancel()
            if self._backend == "nccl" and self._group is not None:
                self._group.abort()

    def join(self, timeout_s: float) -> None:
        """After leaving: until the connections are closed."""
        self._thread.join(timeout_s)

    # Below is the thread's own.

    def _run_thread(self, rendezvous: Rendezvous) -> None:
        on_device = torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()
        with on_device:
            why = self._connect(rendezvous)
            while (asked := self._queue.get()) is not None:
                act, answer = asked
                why = why or self._try(act)
                with contextlib.suppress(InvalidStateError):  # whoever asked does not wait any more
                    answer.set_exception(LinkError(why)) if why else answer.set_result(None)
        self._group = None

    def _connect(self, rendezvous: Rendezvous) -> str:
        def act(_: TorchGroup) -> None:
            self._group = _make_group(self._backend, rendezvous)

        return self._try(act)

    def _try(self, operation: GroupOperation) -> str:
        """'' or why it failed. The failure itself would keep the group alive."""
        try:
            operation(self._group)
        except Exception as failure:
            return f"{self._backend}: {(str(failure).splitlines() or [type(failure).__name__])[0]}"
        return ""


def has_nccl() -> bool:
    return distributed.is_available() and distributed.is_nccl_available()


def _make_group(backend: str, rendezvous: Rendezvous) -> TorchGroup:
    store = rendezvous.connect()
    if backend == "nccl":
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = OPERATION_TIMEOUT
        return distributed.ProcessGroupNCCL(store, rendezvous.rank, rendezvous.size, options)
    options = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname=rendezvous.own_host)]
    options._timeout = OPERATION_TIMEOUT
    return distributed.ProcessGroupGloo(store, rendezvous.rank, rendezvous.size, options)
