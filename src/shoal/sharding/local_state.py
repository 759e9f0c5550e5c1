"""One rank's state of model and optimizer, as named pieces that can be loaded with any other sharding.

Names and shapes are those of the whole model, for every sharding: `/model/<parameter or buffer>` and
`/optimizer/<parameter>/<key>`. So one process, or two with another sharding, can read what four have written.
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
    """This rank's shards of parameters and buffers, by name."""

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
        """The state of a single process."""
        return cls(model, {n: make_local_shard(n, t, owns_replicated=True) for n, t in named_tensors(model).items()})

    @functools.cached_property
    def trainable(self) -> list[LocalShard]:
        """The trainable shards. A rank without any (a pipeline stage may be frozen completely) gets an empty one, so
        that optimizer and sums need no special case."""
        return [shard for shard in self.shards.values() if shard.local_tensor.requires_grad] or [_empty_shard()]

    @property
    def param_module(self) -> nn.Module:
        """A module with the local tensors under their names, from which the optimizer is made."""
        return make_param_module({**self.shards, **{shard.name: shard for shard in self.trainable}}.values())

    @torch.no_grad()
    def initialise(self, deferred_init: DeferredInit) -> None:
        """Set the initial weights, with at most one full tensor in memory at a time."""

        def copy_shard(name: str, values: Tensor) -> None:
            if name in self.shards:
                shard = self.shards[name]
                shard.local_tensor.copy_(shard.tensor_slice.view_of(values))

        deferred_init.materialise(copy_shard)


def _empty_shard() -> LocalShard:
    empty = nn.Parameter(torch.empty(0))
    return LocalShard("nothing", TensorSlice.full((0,)), empty, empty, is_owner=False)


# ---- save ----


def owned_pieces(local_state: LocalState, optimizer: Optimizer | None = None) -> dict[str, TensorPiece]:
    """The pieces that this rank owns, not copied: the next step changes them."""
    pieces = {
        f"/model/{n}": TensorPiece(p.tensor_slice, p.local_tensor.detach())
        for n, p in local_state.shards.items()
        if p.is_owner and is_persistent(local_state, n)
    }
    if optimizer is None:
        return pieces
    for shard in local_state.trainable:
        if shard.is_owner:
            pieces.update(_optimizer_pieces(shard, optimizer.state.get(shard.local_tensor, {})))
    return pieces


def _optimizer_pieces(shard: LocalShard, state: Mapping[str, Any]) -> Iterator[tuple[str, TensorPiece]]:
    """State is sharded like its parameter, or is small and whole (a step count): then the rank with the first element
    owns it."""
    for key, value in state.items():
        if not isinstance(value, Tensor):
            message = f"an optimizer keeps '{key}' of '{shard.name}' as {type(value).__name__}, not as a tensor"
            raise error("SH506", message, fix="Use one of torch's own optimizers.")
        if tuple(value.shape) == shard.tensor_slice.size:
            yield f"/optimizer/{shard.name}/{key}", TensorPiece(shard.tensor_slice, value)
        elif not any(shard.tensor_slice.start):
            yield f"/optimizer/{shard.name}/{key}", TensorPiece(TensorSlice.full(value.shape), value)


def is_persistent(local_state: LocalState, name: str) -> bool:
    """Buffers that are not persistent do not belong to the state."""
    path, _, key = name.rpartition(".")
    return key not in local_state.model.get_submodule(path)._non_persistent_buffers_set


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups' settings, which are the same for every sharding."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


# ---- load ----


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
    """Load this rank's shards from the pieces of any sharding. SH406 if values are missing."""
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
    """Load everything into the replica of a single process."""
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
    """The state of a sharded run in the form of a single process: the replica's tensors, and the rest from `state`."""
    current = replica.state()
    pairs = zip(current["optimizer"]["param_groups"], state["settings"], strict=True)
    groups = [{**saved, "params": own["params"]} for own, saved in pairs]
    return {
        **current,
        **state,
        "model": current["model"],
        "optimizer": {**current["optimizer"], "param_groups": groups},
    }


def load_hyperparameters(optimizer: Optimizer, saved_groups: Sequence[Mapping[str, Any]]) -> None:
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
        group.update(saved)


def _names_under(pieces: PieceReader, prefix: str) -> Iterator[str]:
    """The names directly under the prefix."""
    return (name for name in pieces.names() if name.startswith(prefix) and "/" not in name[len(prefix) :])


def copy_from_pieces(target: Tensor, tensor_slice: TensorSlice, name: str, pieces: PieceReader) -> None:
    """Copy the values of a slice. SH406 if some are missing."""
    count = 0
    for number, other in enumerate(pieces.slices(name)):
        if other.shape != tensor_slice.shape:
            message = f"'{name}' is {list(other.shape)} in the saved state and {list(tensor_slice.shape)} in the model"
            raise error("SH406", message)
        if common := tensor_slice.overlap(other):
            in_target, in_piece = common
            target[in_target] = pieces.read(name, number)[in_piece]
            count += target[in_target].numel()
    if count != math.prod(tensor_slice.size):
        raise error("SH406", f"only {count} of {math.prod(tensor_slice.size)} values of '{name}' are there")
