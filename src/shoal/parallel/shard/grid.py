"""Who holds what together: members in rows, one replica of the model to a row.

torch's own parts of model parallelism (device meshes, DTensors, fully_shard) know their groups by name, in a registry
of the process. So there is one grid at a time, and it is closed before the next one is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

TALKING_TIME = timedelta(minutes=10)


class Grid:
    """Member `rank` of `size`, of whom `ways` hold a replica together. Members of a row have consecutive ranks.

    `number` is another one for each grid of a process: torch remembers what it found out about a mesh, and takes one
    of the same shape and name for the same.
    """

    def __init__(
        self, store: Store, *, rank: int, size: int, ways: int, number: int = 0, timeout: timedelta = TALKING_TIME
    ) -> None:
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        self.replicas, self.ways = size // ways, ways
        self._names = f"replica {number}", f"shard {number}"
        self.mesh = init_device_mesh("cpu", (self.replicas, ways), mesh_dim_names=self._names)
        self.row, self.seat = divmod(rank, ways)
        """Which replica this is, and which part of it is here."""

    @property
    def shard(self) -> DeviceMesh:
        """Those who hold this replica."""
        return self.mesh[self._names[1]]

    @property
    def shard_group(self) -> ProcessGroup:
        return self.mesh.get_group(self._names[1])

    @property
    def replica_group(self) -> ProcessGroup:
        """Those who hold the same part of other replicas."""
        return self.mesh.get_group(self._names[0])

    def rank_of(self, seat: int) -> int:
        """The rank of another member of this row."""
        return self.row * self.ways + seat

    def close(self) -> None:
        distributed.destroy_process_group()


def add_up(tensors: Iterable[Tensor], group: ProcessGroup) -> None:
    """Each becomes the sum over the group, with the same bits everywhere."""
    if group.size() == 1:
        return
    works = [distributed.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    for work in works:
        assert work is not None
        work.wait()


def take_from(tensors: Iterable[Tensor], source: int, group: ProcessGroup) -> None:
    """Each becomes what the member of this rank has."""
    for tensor in tensors:
        distributed.broadcast(tensor, source, group=group)


def largest(value: float, group: ProcessGroup) -> float:
    """Of all members' values."""
    found = torch.tensor(value, dtype=torch.float64)
    distributed.all_reduce(found, op=distributed.ReduceOp.MAX, group=group)
    return float(found)
