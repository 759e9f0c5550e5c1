"""Who holds what together: members in rows, one replica of the model to a row.

torch's own parts of model parallelism (device meshes, DTensors, fully_shard) know their groups by name, in a registry
of the process. So there is one grid at a time, and it is closed before the next one is made.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.net.errors import LinkError

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
POLL_S = 0.05


class ShardMesh:
    """Member `rank` of `size`, of whom `ways` hold a replica together. Members of a row have consecutive ranks.

    `number` is another one for each grid of a process: torch remembers what it found out about a mesh, and takes one
    of the same shape and name for the same.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        replica_size: int,
        number: int = 0,
        timeout: timedelta = COLLECTIVE_TIMEOUT,
    ) -> None:
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        self.replicas, self.replica_size = world_size // replica_size, replica_size
        self._dim_names = f"replica {number}", f"shard {number}"
        self.device_mesh = init_device_mesh("cpu", (self.replicas, replica_size), mesh_dim_names=self._dim_names)
        self.replica_rank, self.shard_rank = divmod(rank, replica_size)
        """Which replica this is, and which part of it is here."""
        self.is_aborted: Callable[[], bool] = lambda: False
        """Will nothing more come of this grid? Asked by whoever waits for a message."""
        self._receive_thread: _ReceiveThread | None = None

    @property
    def shard_mesh(self) -> DeviceMesh:
        """Those who hold this replica."""
        return self.device_mesh[self._dim_names[1]]

    @property
    def shard_group(self) -> ProcessGroup:
        return self.device_mesh.get_group(self._dim_names[1])

    @property
    def replica_group(self) -> ProcessGroup:
        """Those who hold the same part of other replicas."""
        return self.device_mesh.get_group(self._dim_names[0])

    def global_rank(self, shard_rank: int) -> int:
        """The rank of another member of this row."""
        return self.replica_rank * self.replica_size + shard_rank

    def receive(self, into: Tensor, rank: int, group: ProcessGroup | None = None) -> None:
        """What the member of this rank sends. LinkError if the grid is given up meanwhile.

        gloo wakes nobody who waits for the rest of a message whose sender is gone, even if all connections are cut. So
        a thread waits, and may be left behind: it ends when its time is over.
        """
        if self._receive_thread is None:
            self._receive_thread = _ReceiveThread()
        done = self._receive_thread.submit(lambda: distributed.recv(into, rank, group=group))
        while True:
            with contextlib.suppress(TimeoutError):
                done.result(POLL_S)
                return
            if self.is_aborted():
                raise LinkError("a message was not sent to its end")

    def stop_receiving(self) -> None:
        """Nobody receives any more."""
        if self._receive_thread is not None:
            self._receive_thread.stop()

    def close(self) -> None:
        self.stop_receiving()
        distributed.destroy_process_group()


class _ReceiveThread(threading.Thread):
    """Does one thing after the other, for as long as each takes."""

    def __init__(self) -> None:
        super().__init__(name="shoal-receive", daemon=True)
        self._tasks: SimpleQueue[tuple[Callable[[], object], Future[None]] | None] = SimpleQueue()
        self.start()

    def submit(self, act: Callable[[], object]) -> Future[None]:
        done: Future[None] = Future()
        self._tasks.put((act, done))
        return done

    def stop(self) -> None:
        self._tasks.put(None)

    def run(self) -> None:
        while task := self._tasks.get():
            act, done = task
            try:
                act()
                done.set_result(None)
            except Exception as problem:
                done.set_exception(problem)
            del act, done, task


def all_reduce_sum(tensors: Iterable[Tensor], group: ProcessGroup) -> None:
    """Each becomes the sum over the group, with the same bits everywhere."""
    if group.size() == 1:
        return
    works = [distributed.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for work in works:
        assert work is not None
        work.wait()


def broadcast(tensors: Iterable[Tensor], source_rank: int, group: ProcessGroup) -> None:
    """Each becomes what the member of this rank has."""
    for tensor in tensors:
        distributed.broadcast(tensor, source_rank, group=group)


def all_reduce_max(value: float, group: ProcessGroup) -> float:
    """Of all members' values."""
    found = torch.tensor(value, dtype=torch.float64)
    distributed.all_reduce(found, op=distributed.ReduceOp.MAX, group=group)
    return float(found)
