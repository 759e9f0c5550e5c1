"""Heads and neurons of transformers: which outputs and inputs of dense layers belong together, found by what the model
computes.

Noise is added to one output of a layer, and the inputs of the following layer that change depend on it. A row of values
reaches one of these inputs, a row of queries or keys all inputs of its head, a neuron the input that reads it. Each
sample of a batch tries another row.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shoal.compression.groups import Group, GroupMember, Groups, tensors_in
from shoal.compression.importance import cut_channels
from shoal.compression.shape import apply_steps, count_parameters
from shoal.compression.units import ignore_unit
from shoal.errors import describe_exception

ROWS_AT_ONCE = 64
MAX_WORK = 1e11
"""Rows to try, times parameters: more takes too long."""
CHANGED = 1e-6
NOISE = 10.0
SAME = 1e-4
"""Outputs whose largest difference is at most this share of the largest output are equal up to rounding."""


def find_transformer_groups(model: nn.Module, inputs: tuple[Any, ...], outputs: set[str]) -> Groups | None:
    """The heads of the model's attention, as groups with one channel per head, and the neurons between dense layers.
    None if no attention is found. `outputs` are layers whose outputs are those of the model."""
    modules = {n: m for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}
    dense = [n for n, m in model.named_modules() if type(m) is nn.Linear and n not in outputs]
    found = [group for n, m in modules.items() if (group := _module_heads(n, m))]
    rows = sum(model.get_submodule(n).out_features for n in dense)  # type: ignore[misc]
    work = rows * count_parameters(model)
    refused = dict.fromkeys(outputs, "it is an output of the model")
    if work > MAX_WORK:
        reason = "the model is too large to try each of its outputs"
        return Groups(tuple(found), refused | dict.fromkeys(dense, reason)) if found else None
    tried = [_usable(model, inputs, group) for group in (*found, *_dense_groups(model, inputs, dense))]
    found = [group for group in tried if group is not None]
    if all(group.kind == "channels" for group in found):
        return None
    cut = {member.layer for group in found for member in group.members if not member.is_input}
    reason = "its outputs are not read by one dense layer alone"
    return Groups(tuple(found), refused | {n: reason for n in dense if n not in cut})


def _module_heads(name: str, layer: nn.MultiheadAttention) -> Group | None:
    same = layer._qkv_same_embed_dim and layer.bias_k is None and not layer.add_zero_attn
    if not same or layer.num_heads < 2:
        return None
    size, width = layer.head_dim, layer.embed_dim
    heads = range(layer.num_heads)
    columns = tuple(tuple(range(h * size, (h + 1) * size)) for h in heads)
    rows = tuple(tuple(part * width + c for part in range(3) for c in columns[h]) for h in heads)
    members = (GroupMember(name, False, rows), GroupMember(f"{name}.out_proj", True, columns))
    return Group(name, layer.num_heads, members, kind="module")


def check_groups(model: nn.Module, inputs: tuple[Any, ...], groups: list[Group]) -> tuple[list[Group], dict[str, str]]:
    """The groups that the user's code can do without a channel of, and why not for the others.

    The cut model must give what the model gives if its layers ignore the channel. If a group has a layer norm or an
    embedding, the values differ, and only the output's shape must be the same.
    """
    if not groups or _refusal(model, inputs, groups) is None:
        return groups, {}
    whys = {group.name: _refusal(model, inputs, [group]) for group in groups}
    return [g for g in groups if whys[g.name] is None], {name: why for name, why in whys.items() if why}


def _refusal(model: nn.Module, inputs: tuple[Any, ...], groups: list[Group]) -> str | None:
    """Why the model cannot lose the first channel of these groups; None if it can."""
    several = [group for group in groups if group.channels > 1]
    try:
        small = apply_steps(copy.deepcopy(model), [cut_channels(several, [range(1, g.channels) for g in several])])
        shapes, same = _agree(small, _masked(model, several), inputs)
    except Exception as failure:  # the user's code may raise anything
        return f"the model's code does not run without a part of it: {describe_exception(failure)[:200]}"
    exact = not any(isinstance(layer, (nn.LayerNorm, nn.Embedding)) for layer in _layers_of(model, several))
    if not shapes:
        return "the model's output would be smaller without a part of it"
    return None if same or not exact else "the model's code computes something else without a part of it"


def _layers_of(model: nn.Module, groups: Iterable[Group]) -> list[nn.Module]:
    return [model.get_submodule(member.layer) for group in groups for member in group.members]


def _masked(model: nn.Module, groups: Iterable[Group]) -> nn.Module:
    """The model whose layers ignore the first channel of each group."""
    masked = copy.deepcopy(model)
    with torch.no_grad():
        for group in groups:
            for member in group.members:
                layer: Any = masked.get_submodule(member.layer)
                if member.is_input:
                    layer.weight[:, list(member.columns[0])] = 0
                elif isinstance(layer, nn.RNNBase):
                    ignore_unit(layer, list(member.columns[0]))
    return masked


def _usable(model: nn.Module, inputs: tuple[Any, ...], group: Group) -> Group | None:
    """The group in the form in which the user's code runs without a head: with layers that are really narrower, or with
    zeros for what was removed. None if the code computes something else then."""
    forms = [group, replace(group, kind="filled")] if group.kind == "heads" else [group]
    return next((form for form in forms if _refusal(model, inputs, [form]) is None), None)


@torch.no_grad()
def _agree(one: nn.Module, other: nn.Module, inputs: tuple[Any, ...]) -> tuple[bool, bool]:
    """Whether the outputs of both have the same shapes, and then whether they have the same values."""
    pairs = list(zip(tensors_in(one(*inputs)), tensors_in(other(*inputs)), strict=True))
    if not pairs or any(a.shape != b.shape for a, b in pairs):
        return False, False
    return True, all(bool((a - b).abs().max() <= SAME * b.abs().max()) for a, b in pairs if a.numel())


def _dense_groups(model: nn.Module, inputs: tuple[Any, ...], candidates: list[str]) -> list[Group]:
    """Groups of dense layers that feed one reader: queries, keys and values, or the first layer of a dense part."""
    reached: dict[str, dict[str, list[set[int]]]] = {}
    for name in candidates:
        probe = OutputProbe(model, name, len(model.get_submodule(name).weight))  # type: ignore[arg-type]
        sets = probe.run(inputs)
        if sets is not None:
            reached.setdefault(probe.reader, {})[name] = sets
    made = [_group_of_reader(model, reader, rows) for reader, rows in reached.items()]
    return [group for group in made if group is not None]


def _group_of_reader(model: nn.Module, reader: str, rows: Mapping[str, list[set[int]]]) -> Group | None:
    layer = model.get_submodule(reader)
    if type(layer) is not nn.Linear:
        return None
    heads = _components([one for sets in rows.values() for one in sets], layer.in_features)
    if len(heads) < 2 or len({len(head) for head in heads}) > 1:
        return None
    members = []
    for name, sets in rows.items():
        own = [[r for r, one in enumerate(sets) if one <= head] for head in heads]
        if len({len(part) for part in own}) > 1 or not own[0]:
            return None
        members.append(GroupMember(name, False, tuple(map(tuple, own))))
    members.append(GroupMember(reader, True, tuple(tuple(sorted(head)) for head in heads)))
    return Group(next(iter(rows)), len(heads), tuple(members), kind="heads" if len(heads[0]) > 1 else "channels")


def _components(sets: list[set[int]], size: int) -> list[set[int]]:
    """Columns that share a set belong together. In the order of their first column; empty if one is in no set."""
    parts: list[set[int]] = []
    for one in {frozenset(each) for each in sets}:
        joined = set(one).union(*(part for part in parts if part & one))
        parts = [part for part in parts if not part & one] + [joined]
    return sorted(parts, key=min) if sum(map(len, parts)) == size else []


class _ReaderFound(Exception):  # noqa: N818
    """The reader was found: the rest of the model need not run."""


class OutputProbe:
    """Finds which inputs of the next layer depend on each output of a layer."""

    def __init__(self, model: nn.Module, name: str, outputs: int) -> None:
        self._model, self._layer, self._outputs = model, model.get_submodule(name), outputs
        self._rows: list[int] = []
        self._marked: tuple[str, Tensor] | None = None
        self.reader = ""

    @torch.no_grad()
    def run(self, inputs: tuple[Any, ...]) -> list[set[int]] | None:
        """For each output, the inputs of the reader. None if there is no single reader, or an output reaches nothing.

        The reader is the first layer that gets something else. The first half of a batch stays as it is.
        """
        if not all(isinstance(value, Tensor) and value.dim() for value in inputs):
            return None
        total = self._outputs
        hooks = [self._layer.register_forward_hook(self._disturb)]
        hooks += [
            module.register_forward_pre_hook(self._note(name))
            for name, module in self._model.named_modules()
            if isinstance(module, nn.Linear) and module is not self._layer
        ]
        found: list[set[int]] = []
        try:
            for first in range(0, total, ROWS_AT_ONCE):
                self._rows = list(range(first, min(first + ROWS_AT_ONCE, total)))
                self._marked = None
                with contextlib.suppress(_ReaderFound):
                    self._model(*(value[:1].expand(2 * len(self._rows), *value.shape[1:]).clone() for value in inputs))
                if not self._take(found):
                    return None
        except Exception:  # the user's code wants something else than a batch first
            return None
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def _disturb(self, module: Any, args: Any, output: Any) -> Any:
        changed, generator = output.clone(), torch.Generator().manual_seed(0)
        noise = torch.randn(output.shape[1:-1], generator=generator).to(output)
        for sample, row in enumerate(self._rows, start=len(self._rows)):
            changed[sample, ..., row] += NOISE * noise * (1 + output.std())
        return changed

    def _note(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
                before, after = args[0].chunk(2)
                marks = (after - before).abs() > CHANGED * before.abs().max()
                if bool(marks.any()):
                    self._marked = name, marks.flatten(1, -2).any(1) if marks.dim() > 2 else marks
                    raise _ReaderFound

        return hook

    def _take(self, found: list[set[int]]) -> bool:
        if self._marked is None or len(self._marked[1]) != len(self._rows):
            return False
        reader, marks = self._marked
        if self.reader not in ("", reader):
            return False
        self.reader = reader
        sets = [set(row.nonzero()[:, 0].tolist()) for row in marks]
        found += sets
        return all(0 < len(one) < marks.shape[1] for one in sets)
