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

from shoal.checkpoint.raw import CODES, DTYPES
from shoal.parallel.lane_sum import LaneSum
from shoal.parallel.replica import update
from shoal.parallel.shard.grid import Grid
from shoal.parallel.shard.held import load_settings, settings_of
from shoal.parallel.shard.parts import register
from shoal.parallel.shard.replica import ShardedReplica

Specs = Mapping[str, tuple[str, Sequence[int]]]
"""safetensors' word for the dtype, and the shape, by name."""


@dataclass(frozen=True)
class Looks:
    """What a member must know of its neighbour to keep a copy of it; as plain data."""

    specs: Specs
    trainable: list[str]
    moving: list[str]

    @classmethod
    def of(cls, replica: ShardedReplica) -> Looks:
        moving = replica.moving
        trainable = [part.name for part in replica.held.trainable]
        return cls(specs_of(replica.everything()), trainable, moving.floating + moving.others)

    def like(self, name: str, known: Tensor | None = None) -> Tensor:
        """The one that is known, if it looks like that; else memory for one."""
        code, shape = self.specs[name]
        if known is not None and (known.dtype, list(known.shape)) == (DTYPES[code], list(shape)):
            return known
        return torch.empty(list(shape), dtype=DTYPES[code])

    @property
    def update_bytes(self) -> int:
        """Of what is trained: its gradient is as large, and so is each of an optimizer's averages."""
        specs = (self.specs[f"/model/{name}"] for name in self.trainable if f"/model/{name}" in self.specs)
        return sum(torch.Size(shape).numel() * DTYPES[code].itemsize for code, shape in specs)


def specs_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, list[int]]]:
    return {name: (CODES[tensor.dtype], list(tensor.shape)) for name, tensor in tensors.items()}


class Mirror:
    """Of the next member of this row, as it is now. All members make theirs at the same time. `old` is one of the same
    part and step: its memory is used again, and whatever happens meanwhile it stays what it is."""

    def __init__(
        self,
        replica: ShardedReplica,
        looks: Looks,
        make: Callable[[nn.Module], Optimizer],
        old: Mirror | None = None,
    ) -> None:
        grid = replica.cut.grid
        self.part = (grid.seat + 1) % grid.ways
        self._grid = grid
        self._looks = looks
        mine = replica.everything()
        known = old.everything() if old else {}
        theirs = {name: looks.like(name, known.get(name)) for name in sorted(looks.specs)}
        _trade([mine[name] for name in sorted(mine)], list(theirs.values()), grid)
        self._tensors = {name: value for name, value in theirs.items() if name.startswith("/model/")}
        module, self._parameters = nn.Module(), []
        for name in looks.trainable:
            parameter = nn.Parameter(self._tensors.get(f"/model/{name}", torch.empty(0)))
            self._parameters.append(parameter)
            register(module, name, parameter)
        self._optimizer = make(module)
        for name, parameter in zip(looks.trainable, self._parameters, strict=True):
            start = f"/optimizer/{name}/"
            state = {key.removeprefix(start): value for key, value in theirs.items() if key.startswith(start)}
            if state:
                self._optimizer.state[parameter] = state
        self._coming = [torch.empty_like(p, requires_grad=False) for p in self._parameters]
        self._coming += [torch.empty_like(self._tensors[f"/model/{name}"]) for name in looks.moving]

    def trade(self, total: LaneSum) -> None:
        """Everybody's gradient to who keeps a copy of it."""
        _trade([*total.grads, *total.averaged, *total.first], self._coming, self._grid)

    @torch.no_grad()
    def advance(self, optimizer: Optimizer) -> None:
        """The neighbour's update from what was traded last, with this member's settings, which are the same. Before
        these change for the next step."""
        load_settings(self._optimizer, settings_of(optimizer))
        for parameter, grad in zip(self._parameters, self._coming, strict=False):
            parameter.grad = grad
        update(self._optimizer)
        for parameter in self._parameters:
            parameter.grad = None
        for name, value in zip(self._looks.moving, self._coming[len(self._parameters) :], strict=True):
            self._tensors[f"/model/{name}"].copy_(value)

    def everything(self) -> dict[str, Tensor]:
        """See ShardedReplica."""
        found = dict(self._tensors)
        for name, parameter in zip(self._looks.trainable, self._parameters, strict=True):
            state: Mapping[str, Any] = self._optimizer.state.get(parameter, {})
            found |= {f"/optimizer/{name}/{key}": v for key, v in state.items() if isinstance(v, Tensor)}
        return found


def _trade(mine: Sequence[Tensor], theirs: Sequence[Tensor], grid: Grid) -> None:
    """To the member before this one, and from the one after it."""
    before, after = (grid.rank_of((grid.seat + by) % grid.ways) for by in (-1, 1))
    kept = [tensor.contiguous() for tensor in mine if tensor.numel()]
    works = [distributed.isend(tensor, before) for tensor in kept]
    for tensor in theirs:
        if tensor.numel():
            grid.receive(tensor, after)
    for work in works:
        assert work is not None
        work.wait()
