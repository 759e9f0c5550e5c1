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

from shoal.checkpoint.boxes import Box, Piece, Pieces
from shoal.errors import error
from shoal.parallel.replica import Replica
from shoal.parallel.shard.blueprint import Blueprint, named_tensors
from shoal.parallel.shard.cut import Cut
from shoal.parallel.shard.parts import Part, bare, part_of


@dataclass(frozen=True)
class Held:
    """The parts that are here, parameters and buffers, by name."""

    model: nn.Module
    parts: Mapping[str, Part]

    @classmethod
    def of(cls, cut: Cut) -> Held:
        seat, tensors = cut.grid.seat, named_tensors(cut.model)
        here = {name: t for name, t in tensors.items() if not t.is_meta}
        return cls(cut.model, {n: part_of(n, t, answers=cut.holder(n) == seat) for n, t in here.items()})

    @classmethod
    def whole(cls, model: nn.Module) -> Held:
        """By a single process."""
        return cls(model, {n: part_of(n, t, answers=True) for n, t in named_tensors(model).items()})

    @functools.cached_property
    def trainable(self) -> list[Part]:
        """Where nothing may change (a stretch of a pipeline can be frozen altogether), one without elements: who steps
        and sums need not know."""
        return [part for part in self.parts.values() if part.local.requires_grad] or [_nothing()]

    @property
    def bare(self) -> nn.Module:
        """The parts' own tensors under their names: make the optimizer of these."""
        return bare({**self.parts, **{part.name: part for part in self.trainable}}.values())

    @torch.no_grad()
    def fill(self, blueprint: Blueprint) -> None:
        """With the first weights, of which no more than one tensor at a time is here in full."""

        def take(name: str, values: Tensor) -> None:
            if name in self.parts:
                part = self.parts[name]
                part.local.copy_(part.box.of(values))

        blueprint.play(take)


def _nothing() -> Part:
    empty = nn.Parameter(torch.empty(0))
    return Part("nothing", Box.whole((0,)), empty, empty, first=False)


# ---- out ----


def pieces_of(held: Held, optimizer: Optimizer | None = None) -> dict[str, Piece]:
    """What this process answers for: references, to be copied before the next step changes them."""
    found = {
        f"/model/{n}": Piece(p.box, p.local.detach()) for n, p in held.parts.items() if p.first and is_kept(held, n)
    }
    if optimizer is None:
        return found
    for part in held.trainable:
        if part.first:
            found.update(_state_of(part, optimizer.state.get(part.local, {})))
    return found


def _state_of(part: Part, state: Mapping[str, Any]) -> Iterator[tuple[str, Piece]]:
    """State lies like its parameter, or is small and whole (a count of steps): then who has the beginning answers."""
    for key, value in state.items():
        if not isinstance(value, Tensor):
            message = f"an optimizer keeps '{key}' of '{part.name}' as {type(value).__name__}, not as a tensor"
            raise error("SH506", message, fix="Use one of torch's own optimizers.")
        if tuple(value.shape) == part.box.size:
            yield f"/optimizer/{part.name}/{key}", Piece(part.box, value)
        elif not any(part.box.start):
            yield f"/optimizer/{part.name}/{key}", Piece(Box.whole(value.shape), value)


def is_kept(held: Held, name: str) -> bool:
    """Buffers that are not persistent are no part of a state."""
    path, _, key = name.rpartition(".")
    return key not in held.model.get_submodule(path)._non_persistent_buffers_set


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The groups' settings, which are the same in every layout."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


# ---- in ----


class Gathered:
    """Pieces in memory, from one or many processes."""

    def __init__(self, found: Iterable[Mapping[str, Piece]]) -> None:
        self._found: dict[str, list[Piece]] = defaultdict(list)
        for pieces in found:
            for name, piece in pieces.items():
                self._found[name].append(piece)

    def names(self) -> Iterable[str]:
        return self._found

    def boxes(self, name: str) -> list[Box]:
        return [piece.box for piece in self._found.get(name, ())]

    def read(self, name: str, number: int) -> Tensor:
        return self._found[name][number].values


@torch.no_grad()
def load(held: Held, pieces: Pieces, optimizer: Optimizer | None = None) -> None:
    """Take over what belongs here, whoever held it. SH406 if a part is not there in full."""
    for name, part in held.parts.items():
        if is_kept(held, name):
            copy_in(part.local, part.box, f"/model/{name}", pieces)
    if optimizer is None:
        return
    for part in held.trainable:
        start = f"/optimizer/{part.name}/"
        for name in _under(pieces, start):
            box = part.box if pieces.boxes(name)[0].shape == part.box.shape else Box.whole(pieces.boxes(name)[0].shape)
            value = torch.empty(box.size, dtype=pieces.read(name, 0).dtype)
            copy_in(value, box, name, pieces)
            optimizer.state[part.local][name.removeprefix(start)] = value


@torch.no_grad()
def load_whole(replica: Replica, pieces: Pieces) -> None:
    """A single process takes over all of it."""
    held, optimizer = Held.whole(replica.model), replica.optimizer
    load(held, pieces, optimizer)
    for name in replica.moving.names:
        if not is_kept(held, name):
            copy_in(held.parts[name].local, held.parts[name].box, f"/moving/{name}", pieces)
    for part in held.trainable:
        if part.local in optimizer.state:
            optimizer.state[part.inside] = optimizer.state.pop(part.local)


def whole_state(replica: Replica, state: Mapping[str, Any]) -> dict[str, Any]:
    """What was written by many as one would have: tensors as the replica has them, and the rest from the state."""
    mine = replica.state()
    pairs = zip(mine["optimizer"]["param_groups"], state["settings"], strict=True)
    groups = [{**saved, "params": own["params"]} for own, saved in pairs]
    return {**mine, **state, "model": mine["model"], "optimizer": {**mine["optimizer"], "param_groups": groups}}


def load_settings(optimizer: Optimizer, settings: Sequence[Mapping[str, Any]]) -> None:
    for group, saved in zip(optimizer.param_groups, settings, strict=True):
        group.update(saved)


def _under(pieces: Pieces, start: str) -> Iterator[str]:
    """Names of one more word."""
    return (name for name in pieces.names() if name.startswith(start) and "/" not in name[len(start) :])


def copy_in(into: Tensor, box: Box, name: str, pieces: Pieces) -> None:
    """The values of this block. SH406 if they are not all there."""
    count = 0
    for number, other in enumerate(pieces.boxes(name)):
        if other.shape != box.shape:
            message = f"'{name}' is {list(other.shape)} there and {list(box.shape)} in the model"
            raise error("SH406", message)
        if common := box.overlap(other):
            here, there = common
            into[here] = pieces.read(name, number)[there]
            count += into[here].numel()
    if count != math.prod(box.size):
        raise error("SH406", f"{count} of {math.prod(box.size)} values of '{name}' are there")
