"""A copy of a neighbour's part, kept up to date by its gradients: where there is one replica, no death loses a part.

Seat n keeps what seat n + 1 has, and the last what the first has. An update treats every element by itself, so the same
gradient gives the same bits there and here: a step costs as many bytes as the neighbour's gradient has, and a second
update.
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
"""safetensors' word for the dtype, and the shape, by name."""


@dataclass(frozen=True)
class ShardSpec:
    """What a member must know of its neighbour to keep a copy of it; as plain data."""

    specs: TensorSpecs
    trainable: list[str]
    moving: list[str]

    @classmethod
    def of(cls, replica: ShardedReplica) -> ShardSpec:
        moving = replica.moving_buffers
        trainable = [part.name for part in replica.local_state.trainable]
        return cls(tensor_specs(replica.all_tensors()), trainable, moving.float_names + moving.int_names)

    def buffer_for(self, name: str, reuse: Tensor | None = None) -> Tensor:
        """The one that is known, if it looks like that; else memory for one."""
        code, shape = self.specs[name]
        if reuse is not None and (reuse.dtype, list(reuse.shape)) == (DTYPES[code], list(shape)):
            return reuse
        return torch.empty(list(shape), dtype=DTYPES[code])

    @property
    def trainable_bytes(self) -> int:
        """Of what is trained: its gradient is as large, and so is each of an optimizer's averages."""
        specs = (self.specs[f"/model/{name}"] for name in self.trainable if f"/model/{name}" in self.specs)
        return sum(torch.Size(shape).numel() * DTYPES[code].itemsize for code, shape in specs)


def tensor_specs(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, list[int]]]:
    return {name: (DTYPE_CODES[tensor.dtype], list(tensor.shape)) for name, tensor in tensors.items()}


class ShardBackup:
    """Of the next member of this row, as it is now. All members make theirs at the same time. `old` is one of the same
    part and step: its memory is used again, and whatever happens meanwhile it stays what it is."""

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
        mine = replica.all_tensors()
        known = previous.all_tensors() if previous else {}
        theirs = {name: shard_spec.buffer_for(name, known.get(name)) for name in sorted(shard_spec.specs)}
        _exchange_with_neighbours([mine[name] for name in sorted(mine)], list(theirs.values()), mesh)
        self._tensors = {name: value for name, value in theirs.items() if name.startswith("/model/")}
        module, self._parameters = nn.Module(), []
        for name in shard_spec.trainable:
            parameter = nn.Parameter(self._tensors.get(f"/model/{name}", torch.empty(0)))
            self._parameters.append(parameter)
            register_by_path(module, name, parameter)
        self._optimizer = make_optimizer(module)
        for name, parameter in zip(shard_spec.trainable, self._parameters, strict=True):
            start = f"/optimizer/{name}/"
            state = {key.removeprefix(start): value for key, value in theirs.items() if key.startswith(start)}
            if state:
                self._optimizer.state[parameter] = state
        self._received = [torch.empty_like(p, requires_grad=False) for p in self._parameters]
        self._received += [torch.empty_like(self._tensors[f"/model/{name}"]) for name in shard_spec.moving]

    def exchange(self, total: LaneSum) -> None:
        """Everybody's gradient to who keeps a copy of it."""
        _exchange_with_neighbours([*total.grads, *total.float_buffers, *total.int_buffers], self._received, self._mesh)

    @torch.no_grad()
    def apply_update(self, optimizer: Optimizer) -> None:
        """The neighbour's update from what was traded last, with this member's settings, which are the same. Before
        these change for the next step."""
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
        found = dict(self._tensors)
        for name, parameter in zip(self._shard_spec.trainable, self._parameters, strict=True):
            state: Mapping[str, Any] = self._optimizer.state.get(parameter, {})
            found |= {f"/optimizer/{name}/{key}": v for key, v in state.items() if isinstance(v, Tensor)}
        return found


def _exchange_with_neighbours(outgoing: Sequence[Tensor], incoming: Sequence[Tensor], mesh: ShardMesh) -> None:
    """To the member before this one, and from the one after it."""
    before, after = (mesh.global_rank((mesh.shard_rank + by) % mesh.replica_size) for by in (-1, 1))
    kept = [tensor.contiguous() for tensor in outgoing if tensor.numel()]
    works = [distributed.isend(tensor, before) for tensor in kept]
    for tensor in incoming:
        if tensor.numel():
            mesh.receive(tensor, after)
    for work in works:
        assert work is not None
        work.wait()
