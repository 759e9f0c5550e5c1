"""Which outputs and inputs of layers can only be removed together. Only this module knows torch-pruning."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shoal.compression.attention import check_groups, find_transformer_groups
from shoal.compression.groups import Group, GroupMember, Groups, tensors_in
from shoal.compression.heads import WideLinear
from shoal.compression.optional import load_library
from shoal.compression.recurrent import find_recurrent_groups
from shoal.compression.shape import BATCH_NORMS, CONVOLUTIONS, computed_parameter, computed_reason
from shoal.errors import describe_exception, error

CUTTABLE = (nn.Linear, *CONVOLUTIONS, *BATCH_NORMS, nn.LayerNorm, nn.Embedding)


def find_groups(model: nn.Module, inputs: tuple[Any, ...]) -> Groups:
    """The groups of a model, by tracing it on these inputs."""
    model.eval()
    outputs = _last_layers(model, inputs)
    groups = find_transformer_groups(model, inputs, outputs) or _channel_groups(model, inputs, outputs)
    found, refused = find_recurrent_groups(model, inputs)
    return _without_computed(model, Groups((*groups.found, *found), {**groups.refused, **refused}))


def _without_computed(model: nn.Module, groups: Groups) -> Groups:
    """Only groups whose layers have parameters of their own."""
    layers = dict(model.named_modules())
    computed = {name: part for name, layer in layers.items() if (part := computed_parameter(layer)) is not None}
    found = tuple(one for one in groups.found if not any(member.layer in computed for member in one.members))
    whys = {name: computed_reason(part) for name, part in computed.items()}
    rest = {one.name: "a layer that goes with it computes its weight" for one in groups.found if one not in found}
    return Groups(found, {**groups.refused, **rest, **whys})


def _channel_groups(model: nn.Module, inputs: tuple[Any, ...], outputs: set[str]) -> Groups:
    """Groups that follow from the operations between layers."""
    tp = load_library("torch_pruning")
    names = {module: name for name, module in model.named_modules()}
    with _quiet():
        try:
            graph = tp.DependencyGraph().build_dependency(model, example_inputs=inputs)
        except Exception as failure:
            what = describe_exception(failure)
            raise error("SH662", f"its dependencies cannot be found: {what}", where=type(model).__name__) from failure
        found: list[Group] = []
        refused: dict[str, str] = {}
        seen: set[nn.Module] = set()
        for module, name in names.items():
            if module in seen or not isinstance(module, (nn.Linear, *CONVOLUTIONS)):
                continue
            made, why = _group_of(tp, graph, module, names, outputs)
            if made is None:
                refused[name] = why
            else:
                seen |= {model.get_submodule(m.layer) for m in made.members if not m.is_input}
                found.append(made)
    fit, unfit = check_groups(model, inputs, found)
    refused |= {m.layer: unfit[g.name] for g in found if g.name in unfit for m in g.members if not m.is_input}
    return Groups(tuple(fit), refused)


def _group_of(
    tp: Any, graph: Any, module: Any, names: Mapping[nn.Module, str], outputs: set[str]
) -> tuple[Group | None, str]:
    channels, name = len(module.weight), names[module]
    if name in outputs:
        return None, "it is an output of the model"
    if isinstance(module, WideLinear):
        return None, "heads were removed from it already"
    if isinstance(module, CONVOLUTIONS) and module.groups > 1:
        return None, "it belongs to the group of the layer before it"
    prune = tp.prune_linear_out_channels if isinstance(module, nn.Linear) else tp.prune_conv_out_channels
    try:
        items = graph.get_pruning_group(module, prune, idxs=list(range(channels)))
    except Exception as failure:
        return None, describe_exception(failure)
    members: dict[tuple[str, bool], GroupMember] = {}
    for dependency, indices in items:
        layer = dependency.target.module
        if layer not in names:
            if type(layer).__name__.startswith("_"):
                continue  # an operation between layers, without parameters
            return None, f"a {type(layer).__name__} outside of a layer goes with it"
        if not isinstance(layer, CUTTABLE) or isinstance(layer, WideLinear):
            return None, f"'{names[layer]}', a {type(layer).__name__}, goes with it"
        if names[layer] in outputs and not _is_input(graph, dependency):
            return None, "it is an output of the model"
        member = _member(names[layer], layer, indices, channels, is_input=_is_input(graph, dependency))
        if member is None or (old := members.get((member.layer, member.is_input), member)).columns != member.columns:
            return None, f"its channels are mixed before '{names[layer]}'"
        members[member.layer, member.is_input] = old
    return Group(name, channels, tuple(members.values())), ""


def _is_input(graph: Any, dependency: Any) -> bool:
    layer = dependency.target.module
    return isinstance(layer, (nn.Linear, *CONVOLUTIONS)) and bool(graph.is_in_channel_pruning_fn(dependency.handler))


def _member(name: str, layer: Any, indices: list[Any], channels: int, *, is_input: bool) -> GroupMember | None:
    """The member whose indices belong to the channels in order: several per channel after a flatten."""
    depthwise = isinstance(layer, CONVOLUTIONS) and layer.groups > 1
    each, rest = divmod(len(indices), channels)
    if rest or not each or len(set(indices)) != len(indices):
        return None
    columns = tuple(tuple(int(i) for i in indices[c * each : (c + 1) * each]) for c in range(channels))
    return GroupMember(name, is_input and not depthwise, columns)


def _last_layers(model: nn.Module, inputs: tuple[Any, ...]) -> set[str]:
    """Layers whose output is an output of the model, found by what changes in shape: the tensors themselves."""
    results: dict[int, str] = {}
    kept: list[Any] = []

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor):
                results[output.data_ptr()] = name
                kept.append(output)

        return hook

    hooks = [
        module.register_forward_hook(note(name))
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, *CONVOLUTIONS))
    ]
    try:
        with torch.no_grad():
            output = model(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return {results[t.data_ptr()] for t in tensors_in(output) if t.data_ptr() in results}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The library warns about every unwrapped parameter; what matters is in `refused`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
