"""The mesh of ranks: each row of the mesh is one replica of the model.

torch's model parallelism (device meshes, DTensors, fully_shard) finds its groups by name in a registry of the process.
So there is one mesh at a time, and it is closed before the next one is made.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue

import psutil
import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import debug
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache

from shoal.net.errors import LinkError

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
POLL_S = 0.05
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


@contextlib.contextmanager
def gloo_listens_at(address: str) -> Iterator[None]:
    """Groups that are made meanwhile listen on the interface with this address. The name of a host, which gloo would
    look up, is often that of loopback. A choice of the user stays."""
    found = [name for name, own in psutil.net_if_addrs().items() if any(one.address == address for one in own)]
    if not found or INTERFACE_VARIABLE in os.environ:
        yield
        return
    os.environ[INTERFACE_VARIABLE] = found[0]
    try:
        yield
    finally:
        os.environ.pop(INTERFACE_VARIABLE, None)


class ShardMesh:
    """Rank `rank` of `world_size`; `replica_size` consecutive ranks hold one replica.

    `own_host` is the address at which the other ranks reach this one; without it, torch takes that of the host's name.
    `number` must differ for each mesh of a process: torch caches facts about a mesh, and treats a mesh of the same
    shape and name as the same.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        replica_size: int,
        own_host: str = "",
        number: int = 0,
        timeout: timedelta = COLLECTIVE_TIMEOUT,
    ) -> None:
        self.replicas, self.replica_size = world_size // replica_size, replica_size
        self._dim_names = f"replica {number}", f"shard {number}"
        with gloo_listens_at(own_host):
            distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
            self.device_mesh = init_device_mesh("cpu", (self.replicas, replica_size), mesh_dim_names=self._dim_names)
        self.replica_rank, self.shard_rank = divmod(rank, replica_size)
        """Index of this rank's replica, and of its shard within the replica."""
        self.is_aborted: Callable[[], bool] = lambda: False
        """Whether the mesh is aborted; checked while a rank waits for a message."""
        self._receive_thread: _ReceiveThread | None = None

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The ranks of this replica."""
        return self.device_mesh[self._dim_names[1]]

    @property
    def shard_group(self) -> ProcessGroup:
        return self.device_mesh.get_group(self._dim_names[1])

    @property
    def replica_group(self) -> ProcessGroup:
        """The ranks with the same shard of all replicas."""
        return self.device_mesh.get_group(self._dim_names[0])

    def global_rank(self, shard_rank: int) -> int:
        """The global rank of a shard of this replica."""
        return self.replica_rank * self.replica_size + shard_rank

    def receive(self, into: Tensor, rank: int, group: ProcessGroup | None = None) -> None:
        """Receive a tensor from a rank. LinkError if the mesh is aborted meanwhile.

        gloo does not wake a thread that waits for the rest of a message whose sender is gone, even if all connections
        are closed. So a separate thread waits. It may be abandoned, and ends with the collective's timeout.
        """
        if self._receive_thread is None:
            self._receive_thread = _ReceiveThread()
        done = self._receive_thread.submit(lambda: distributed.recv(into, rank, group=group))
        while True:
            with contextlib.suppress(TimeoutError):
                done.result(POLL_S)
                return
            if self.is_aborted():
                raise LinkError("the mesh was aborted before a message was complete")

    def stop_receiving(self) -> None:
        """Stop the receiving thread."""
        if self._receive_thread is not None:
            self._receive_thread.stop()

    def close(self) -> None:
        self.stop_receiving()
        forget_mesh(self.device_mesh)
        distributed.destroy_process_group()


def forget_mesh(mesh: DeviceMesh) -> None:
    """Let the mesh's groups go with their threads and sockets. torch's caches keep every mesh that they have seen, and
    a mesh keeps its groups."""
    mesh._get_root_mesh()._pg_registry.clear()
    debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    clear_redistribute_planner_cache()


class _ReceiveThread(threading.Thread):
    """Runs submitted functions one after the other."""

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
    """Sum each tensor over the group, in place, with the same bits on every rank."""
    if group.size() == 1:
        return
    works = [distributed.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for work in works:
        assert work is not None
        work.wait()


def broadcast(tensors: Iterable[Tensor], source_rank: int, group: ProcessGroup) -> None:
    """Copy each tensor from the source rank to all ranks of the group."""
    for tensor in tensors:
        distributed.broadcast(tensor, source_rank, group=group)


def all_reduce_max(value: float, group: ProcessGroup) -> float:
    """The largest value in the group."""
    result = torch.tensor(value, dtype=torch.float64)
    distributed.all_reduce(result, op=distributed.ReduceOp.MAX, group=group)
    return float(result)
