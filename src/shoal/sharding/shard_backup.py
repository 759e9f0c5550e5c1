"""A live backup of the next rank's shard, updated with its gradients: with a single replica, no death loses a shard.

Shard rank n backs up shard n + 1, and the last rank the first shard. Updates are elementwise, so the same gradient
gives the same bits on both ranks. A step costs the bytes of the neighbour's gradient and a second update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from shoal.checkpoint.tensor_bytes import DTYPE_CODES, DTYPES
from shoal.lanes.lane_sum import LaneSum
from shoal.lanes.replica import optimizer_step
from shoal.sharding.device_mesh import ShardMesh
from shoal.sharding.local_shards import register_by_path
from shoal.sharding.local_state import hyperparameters, load_hyperparameters
from shoal.sharding.replica import ShardedReplica

TensorSpecs = Mapping[str, tuple[str, Sequence[int]]]
"""safetensors' code of the dtype, and the shape, by name."""


@dataclass(frozen=True)
class ShardSpec:
    """What a rank must know of its neighbour's shard to back it up, as plain data."""

    specs: TensorSpecs
    trainable: list[str]
    moving: list[str]

    @classmethod
    def of(cls, replica: ShardedReplica) -> ShardSpec:
        moving = replica.moving_buffers
        trainable = [part.name for part in replica.local_state.trainable]
        return cls(tensor_specs(replica.all_tensors()), trainable, moving.float_names + moving.int_names)

    def buffer_for(self, name: str, reuse: Tensor | None = None) -> Tensor:
        """`reuse` if it has the right dtype and shape, else a new tensor."""
        code, shape = self.specs[name]
        if reuse is not None and (reuse.dtype, list(reuse.shape)) == (DTYPES[code], list(shape)):
            return reuse
        return torch.empty(list(shape), dtype=DTYPES[code])

    @property
    def trainable_bytes(self) -> int:
        """Bytes of the trainable shards: the gradient, and each slot of the optimizer, has the same size."""
        specs = (self.specs[f"/model/{name}"] for name in self.trainable if f"/model/{name}" in self.specs)
        return sum(torch.Size(shape).numel() * DTYPES[code].itemsize for code, shape in specs)


def tensor_specs(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, list[int]]]:
    return {name: (DTYPE_CODES[tensor.dtype], list(tensor.shape)) for name, tensor in tensors.items()}


class ShardBackup:
    """A backup of the next rank's current shard. All ranks make theirs at the same time. `previous` is a backup of the
    same shard and step: its memory is reused, and its values stay valid even if this fails."""

    def __init__(
        self,
        replica: ShardedReplica,
        shard_spec: ShardSpec,
        make_optimizer: Callable[[nn.Module], Optimizer],
        previous: ShardBackup | None = None,
    ) -> None:
        mesh = replica.sharded_model.mesh
        self.shard_rank = (mesh.shard_rank + 1) % mesh.replica_size
        self._mesh = mesh
        self._shard_spec = shard_spec
        own = replica.all_tensors()
        reusable = previous.all_tensors() if previous else {}
        neighbours = {name: shard_spec.buffer_for(name, reusable.get(name)) for name in sorted(shard_spec.specs)}
        _exchange_with_neighbours([own[name] for name in sorted(own)], list(neighbours.values()), mesh)
        self._tensors = {name: value for name, value in neighbours.items() if name.startswith("/model/")}
        module, self._parameters = nn.Module(), []
        for name in shard_spec.trainable:
            parameter = nn.Parameter(self._tensors.get(f"/model/{name}", torch.empty(0)))
            self._parameters.append(parameter)
            register_by_path(module, name, parameter)
        self._optimizer = make_optimizer(module)
        for name, parameter in zip(shard_spec.trainable, self._parameters, strict=True):
            start = f"/optimizer/{name}/"
            state = {key.removeprefix(start): value for key, value in neighbours.items() if key.startswith(start)}
            if state:
                self._optimizer.state[parameter] = state
        self._received = [torch.empty_like(p, requires_grad=False) for p in self._parameters]
        self._received += [torch.empty_like(self._tensors[f"/model/{name}"]) for name in shard_spec.moving]

    def exchange(self, total: LaneSum) -> None:
        """Send this rank's gradient to the rank that backs it up; receive the neighbour's."""
        _exchange_with_neighbours([*total.grads, *total.float_buffers, *total.int_buffers], self._received, self._mesh)

    @torch.no_grad()
    def apply_update(self, optimizer: Optimizer) -> None:
        """Apply the neighbour's update from the last exchange, with this rank's hyperparameters, which are the same.
        Call it before they change for the next step."""
        load_hyperparameters(self._optimizer, hyperparameters(optimizer))
        for parameter, grad in zip(self._parameters, self._received, strict=False):
            parameter.grad = grad
        optimizer_step(self._optimizer)
        for parameter in self._parameters:
            parameter.grad = None
        for name, value in zip(self._shard_spec.moving, self._received[len(self._parameters) :], strict=True):
            self._tensors[f"/model/{name}"].copy_(value)

    def all_tensors(self) -> dict[str, Tensor]:
        """See ShardedReplica."""
        tensors = dict(self._tensors)
        for name, parameter in zip(self._shard_spec.trainable, self._parameters, strict=True):
            state: Mapping[str, Any] = self._optimizer.state.get(parameter, {})
            tensors |= {f"/optimizer/{name}/{key}": v for key, v in state.items() if isinstance(v, Tensor)}
        return tensors


def _exchange_with_neighbours(outgoing: Sequence[Tensor], incoming: Sequence[Tensor], mesh: ShardMesh) -> None:
    """Send to the previous rank of the replica, and receive from the next one."""
    before, after = (mesh.global_rank((mesh.shard_rank + by) % mesh.replica_size) for by in (-1, 1))
    contiguous = [tensor.contiguous() for tensor in outgoing if tensor.numel()]
    works = [distributed.isend(tensor, before) for tensor in contiguous]
    for tensor in incoming:
        if tensor.numel():
            mesh.receive(tensor, after)
    for work in works:
        assert work is not None
        work.wait()
