"""Channels, neurons and heads that can be removed one by one, and every place where each of them is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch


@dataclass(frozen=True)
class GroupMember:
    """One side of one layer in a group. `columns[c]` are the indices there that belong to channel c."""

    layer: str
    is_input: bool
    columns: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Group:
    """`kind`: channels of layers; heads of dense layers, cut like channels; heads in code that wants the old width, so
    that zeros fill it (`filled`); heads of a torch.nn.MultiheadAttention (`module`); units of a recurrent layer, cut
    like channels (`recurrent`)."""

    name: str
    channels: int
    members: tuple[GroupMember, ...]
    kind: Literal["channels", "heads", "filled", "module", "recurrent"] = "channels"


@dataclass(frozen=True)
class Groups:
    """`refused` has layers that cannot be cut, with the reasons."""

    found: tuple[Group, ...]
    refused: Mapping[str, str]

    def without_prefix(self, prefix: str) -> Groups:
        """The same groups with shorter names of layers."""
        found = []
        for group in self.found:
            members = tuple(replace(one, layer=one.layer.removeprefix(prefix)) for one in group.members)
            found.append(replace(group, name=group.name.removeprefix(prefix), members=members))
        return Groups(tuple(found), {name.removeprefix(prefix): why for name, why in self.refused.items()})


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a model's output, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
