"""What a process holds of a model and its optimizer, as named pieces that fit any other layout.

Names and shapes are those of the whole model, whoever holds it and however it is cut: `/model/<parameter or buffer>`
and `/optimizer/<parameter>/<key>`. So what four processes wrote is read by one, or by two that cut it otherwise.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.checkpoint.slices import PieceReader, TensorPiece, TensorSlice
from shoal.errors import error
from shoal.lanes.replica import Replica
from shoal.sharding.deferred_init import DeferredInit, named_tensors
from shoal.sharding.local_shards import LocalShard, make_local_shard, make_param_module
from shoal.sharding.sharded_model import ShardedModel


@dataclass(frozen=True)
class LocalState:
    """The parts that are here, parameters and buffers, by name."""

    model: nn.Module
    shards: Mapping[str, LocalShard]

    @classmethod
    def of(cls, sharded_model: ShardedModel) -> LocalState:
        seat, tensors = sharded_model.mesh.shard_rank, named_tensors(sharded_model.model)
        here = {name: t for name, t in tensors.items() if not t.is_meta}
        return cls(
            sharded_model.model,
            {n: make_local_shard(n, t, owns_replicated=sharded_model.owner(n) == seat) for n, t in here.items()},
        )

    @classmethod
    def unsharded(cls, model: nn.Module) -> LocalState:
        """By a single process."""
        return cls(model, {n: make_local_shard(n, t, owns_replicated=True) for n, t in named_tensors(model).items()})

    @functools.cached_property
    def trainable(self) -> list[LocalShard]:
        """Where nothing may change (a stretch of a pipeline can be frozen altogether), one without elements: who steps
        and sums need not know."""
        return [part for part in self.shards.values() if part.local_tensor.requires_grad] or [_empty_shard()]

    @property
    def param_module(self) -> nn.Module:
        """The parts' own tensors under their names: make the optimizer of these."""
        return make_param_module({**self.shards, **{part.name: part for part in self.trainable}}.values())

    @torch.no_grad()
    def initialise(self, deferred_init: DeferredInit) -> None:
        """With the first weights, of which no more than one tensor at a time is here in full."""

        def take(name: str, values: Tensor) -> None:
            if name in self.shards:
                part = self.shards[name]
                part.local_tensor.copy_(part.tensor_slice.view_of(values))

        deferred_init.materialise(take)


def _empty_shard() -> LocalShard:
    empty = nn.Parameter(torch.empty(0))
    return LocalShard("nothing", TensorSlice.full((0,)), empty, empty, is_owner=False)


# ---- out ----


def owned_pieces(local_state: LocalState, optimizer: Optimizer | None = None) -> dict[str, TensorPiece]:
    """What this process answers for: references, to be copied before the next step changes them."""
    found = {
        f"/model/{n}": TensorPiece(p.tensor_slice, p.local_tensor.detach())
        for n, p in local_state.shards.items()
        if p.is_owner and is_persistent(local_state, n)
    }
    if optimizer is None:
        return found
    for shard in local_state.trainable:
        if shard.is_owner:
            found.update(_optimizer_pieces(shard, optimizer.state.get(shard.local_tensor, {})))
    return found


def _optimizer_pieces(shard: LocalShard, state: Mapping[str, Any]) -> Iterator[tuple[str, TensorPiece]]:
    """State lies like its parameter, or is small and whole (a count of steps): then who has the beginning answers."""
    for key, value in state.items():
        if not isinstance(value, Tensor):
            message = f"an optimizer keeps '{key}' of '{shard.name}' as {type(value).__name__}, not as a tensor"
            raise error("SH506", message, fix="Use one of torch's own optimizers.")
        if tuple(value.shape) == shard.tensor_slice.size:
            yield f"/optimizer/{shard.name}/{key}", TensorPiece(shard.tensor_slice, value)
        elif not any(shard.tensor_slice.start):
            yield f"/optimizer/{shard.name}/{key}", TensorPiece(TensorSlice.full(value.shape), value)


def is_persistent(local_state: LocalState, name: str) -> bool:
    """Buffers that are not persistent are no part of a state."""
    path, _, key = name.rpartition(".")
    return key not in local_state.model.get_submodule(path)._non_persistent_buffers_set


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups' settings, which are the same in every layout."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


# ---- in ----


class PiecesInMemory:
    """Pieces in memory, from one or many processes."""

    def __init__(self, sources: Iterable[Mapping[str, TensorPiece]]) -> None:
        self._pieces: dict[str, list[TensorPiece]] = defaultdict(list)
        for pieces in sources:
            for name, piece in pieces.items():
                self._pieces[name].append(piece)

    def names(self) -> Iterable[str]:
        return self._pieces

    def slices(self, name: str) -> list[TensorSlice]:
        return [piece.tensor_slice for piece in self._pieces.get(name, ())]

    def read(self, name: str, number: int) -> Tensor:
        return self._pieces[name][number].values


@torch.no_grad()
def load_local_state(local_state: LocalState, pieces: PieceReader, optimizer: Optimizer | None = None) -> None:
    """Take over what belongs here, whoever held it. SH406 if a part is not there in full."""
    for name, shard in local_state.shards.items():
        if is_persistent(local_state, name):
            copy_from_pieces(shard.local_tensor, shard.tensor_slice, f"/model/{name}", pieces)
    if optimizer is None:
        return
    for shard in local_state.trainable:
        start = f"/optimizer/{shard.name}/"
        for name in _names_under(pieces, start):
            tensor_slice = (
                shard.tensor_slice
                if pieces.slices(name)[0].shape == shard.tensor_slice.shape
                else TensorSlice.full(pieces.slices(name)[0].shape)
            )
            value = torch.empty(tensor_slice.size, dtype=pieces.read(name, 0).dtype)
            copy_from_pieces(value, tensor_slice, name, pieces)
            optimizer.state[shard.local_tensor][name.removeprefix(start)] = value


@torch.no_grad()
def load_unsharded(replica: Replica, pieces: PieceReader) -> None:
    """A single process takes over all of it."""
    local_state, optimizer = LocalState.unsharded(replica.model), replica.optimizer
    load_local_state(local_state, pieces, optimizer)
    for name in replica.moving_buffers.names:
        if not is_persistent(local_state, name):
            copy_from_pieces(
                local_state.shards[name].local_tensor, local_state.shards[name].tensor_slice, f"/moving/{name}", pieces
            )
    for shard in local_state.trainable:
        if shard.local_tensor in optimizer.state:
            optimizer.state[shard.model_tensor] = optimizer.state.pop(shard.local_tensor)


def unsharded_state(replica: Replica, state: Mapping[str, Any]) -> dict[str, Any]:
    """What was written by many as one would have: tensors as the replica has them, and the rest from the state."""
    mine = replica.state()
    pairs = zip(mine["optimizer"]["param_groups"], state["settings"], strict=True)
    groups = [{**saved, "params": own["params"]} for own, saved in pairs]
    return {**mine, **state, "model": mine["model"], "optimizer": {**mine["optimizer"], "param_groups": groups}}


def load_hyperparameters(optimizer: Optimizer, saved_groups: Sequence[Mapping[str, Any]]) -> None:
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
        group.update(saved)


def _names_under(pieces: PieceReader, prefix: str) -> Iterator[str]:
    """Names of one more word."""
    return (name for name in pieces.names() if name.startswith(prefix) and "/" not in name[len(prefix) :])


def copy_from_pieces(target: Tensor, tensor_slice: TensorSlice, name: str, pieces: PieceReader) -> None:
    """The values of this block. SH406 if they are not all there."""
    count = 0
    for number, other in enumerate(pieces.slices(name)):
        if other.shape != tensor_slice.shape:
            message = f"'{name}' is {list(other.shape)} there and {list(tensor_slice.shape)} in the model"
            raise error("SH406", message)
        if common := tensor_slice.overlap(other):
            here, there = common
            target[here] = pieces.read(name, number)[there]
            count += target[here].numel()
    if count != math.prod(tensor_slice.size):
        raise error("SH406", f"{count} of {math.prod(tensor_slice.size)} values of '{name}' are there")
