"""A torch process group that a worker can leave at any time.

Nothing wakes a thread that waits inside gloo, neither `abort` nor `shutdown`. So the group lives in a thread of its
own, from the first connection to the last. The caller waits for that thread's answer, and its wait can be cancelled. No
global state remains, neither a default group nor an environment variable.
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
"""Time after which a group that its worker has left gives up an operation. Callers cancel their wait long before."""

TorchGroup = Any  # torch's own: ProcessGroupGloo or ProcessGroupNCCL
GroupOperation = Callable[[TorchGroup], None]
_PORT = struct.Struct("<H")


@dataclass(frozen=True)
class Rendezvous:
    """Where the `size` members of a torch group meet: at `port` of `host`, where rank 0 has the `listener`. `own_host`
    is the address at which this member can be reached."""

    rank: int
    size: int
    host: str
    port: int
    own_host: str
    listener: socket.socket | None = None

    def connect(self) -> TCPStore:
        """Connect to the store in which members find each other. Rank 0 hosts it."""
        listens: dict[str, Any] = {"is_master": False}
        if self.listener:
            listens = {"is_master": True, "master_listen_fd": os.dup(self.listener.fileno())}  # the store closes it
        return TCPStore(
            self.host, self.port, wait_for_workers=False, timeout=RENDEZVOUS_TIMEOUT, multi_tenant=False, **listens
        )


@contextlib.contextmanager
def rendezvous(group: ViewGroup, ranks: Mapping[int, int]) -> Iterator[Rendezvous]:
    """Agree where the members of the present view meet for a torch group, by their ranks. LinkError if one is lost."""
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
        if len(ports[first]) != _PORT.size:
            raise LinkError(f"seat {first} sent {len(ports[first])} bytes instead of its port")
        (port_there,) = _PORT.unpack(ports[first])
        yield Rendezvous(ranks[seat], len(ranks), view.addresses[first].host, port_there, host, listener)
    finally:
        if listener:
            listener.close()


class AbortableProcessGroup:
    """`run` is for one thread, `leave` for any."""

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
        """Run the operation in the group's thread. LinkError if it fails, or when this member leaves."""
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
        """Wake the thread that waits in `run`. The group's thread closes the connections as soon as its present
        operation ends; the other members notice that."""
        with self._guard:
            self._left = True
            self._queue.put(None)
            if self._pending:
                self._pending.cancel()
            if self._backend == "nccl" and self._group is not None:
                self._group.abort()

    def join(self, timeout_s: float) -> None:
        """Wait until the connections are closed, after `leave`."""
        self._thread.join(timeout_s)

    # The methods below run in the group's thread.

    def _run_thread(self, rendezvous: Rendezvous) -> None:
        on_device = torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()
        with on_device:
            why = self._connect(rendezvous)
            while (asked := self._queue.get()) is not None:
                act, answer = asked
                why = why or self._try(act)
                with contextlib.suppress(InvalidStateError):  # the caller no longer waits
                    answer.set_exception(LinkError(why)) if why else answer.set_result(None)
        self._group = None

    def _connect(self, rendezvous: Rendezvous) -> str:
        def act(_: TorchGroup) -> None:
            self._group = _make_group(self._backend, rendezvous)

        return self._try(act)

    def _try(self, operation: GroupOperation) -> str:
        """Returns '' or why the operation failed. The exception itself would keep the group alive."""
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
