"""Which layers read the outputs of a layer, and how its outputs are numbered there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from shoal.compression.bounds import (
    PASSING,
    POOLS,
    RESHAPING_METHODS,
    RISING,
    RISING_FUNCTIONS,
    RISING_METHODS,
)
from shoal.compression.shape import BATCH_NORMS, CONVOLUTIONS, computed_parameter
from shoal.errors import error

RESHAPING_FUNCTIONS = (torch.flatten, torch.reshape)
POOLING_FUNCTIONS = tuple(f for f in RISING_FUNCTIONS if "pool" in getattr(f, "__name__", ""))


@dataclass(frozen=True)
class Reader:
    """A layer that reads outputs of another one. `node` is the value that it gets."""

    layer: str
    node: str


def layers_of(graph: fx.GraphModule) -> Iterator[tuple[fx.Node, str, Any]]:
    """Dense layers and plain convolutions that the model calls exactly once, and whose parameters nothing else reads or
    computes."""
    calls = Counter(str(n.target) for n in graph.graph.nodes if n.op == "call_module")
    owners = Counter(id(p) for m in graph.modules() for p in m.parameters(recurse=False))
    read = {str(n.target).rpartition(".")[0] for n in graph.graph.nodes if n.op == "get_attr"}
    for node in graph.graph.nodes:
        if node.op != "call_module" or calls[str(node.target)] != 1:
            continue
        layer = graph.get_submodule(str(node.target))
        plain = isinstance(layer, nn.Linear) or (isinstance(layer, CONVOLUTIONS) and layer.groups == 1)
        alone = str(node.target) not in read and all(owners[id(p)] == 1 for p in layer.parameters())
        if plain and alone and computed_parameter(layer) is None:
            yield node, str(node.target), layer


def batch_norms_after(graph: fx.GraphModule) -> list[tuple[str, str]]:
    """Pairs (layer, norm) in which the norm is all that reads the layer."""
    found = []
    calls = Counter(str(n.target) for n in graph.graph.nodes if n.op == "call_module")
    for node, name, layer in layers_of(graph):
        following = list(node.users)
        if len(following) != 1 or following[0].op != "call_module" or calls[str(following[0].target)] != 1:
            continue
        norm = graph.get_submodule(str(following[0].target))
        fits = isinstance(norm, BATCH_NORMS) and norm.running_var is not None and computed_parameter(norm) is None
        if fits and norm.num_features == len(layer.weight):
            found.append((name, str(following[0].target)))
    return found


def readers_of(graph: fx.GraphModule, node: fx.Node) -> list[Reader]:
    """All layers that read the node through operations that keep its channels apart. SH662 with the reason if anything
    else reads it."""
    return list(_readers(graph, node, reshaped=False))


def _readers(graph: fx.GraphModule, node: fx.Node, *, reshaped: bool) -> Iterator[Reader]:
    if not node.users:
        raise error("SH662", "nothing reads it")
    for user in node.users:
        if user.op == "output":
            raise error("SH662", "it is an output of the model")
        if user.op == "call_module":
            layer = graph.get_submodule(str(user.target))
            if isinstance(layer, (nn.Linear, *CONVOLUTIONS)):
                yield Reader(str(user.target), node.name)
                continue
            if not isinstance(layer, (*PASSING, *RISING)) and (reshaped or not isinstance(layer, POOLS)):
                raise error("SH662", f"a {type(layer).__name__} reads it")
            yield from _readers(graph, user, reshaped=reshaped or isinstance(layer, nn.Flatten))
        elif user.op == "call_method" and user.target == "size":
            continue
        else:
            reshapes = _passes(user, reshaped=reshaped)
            yield from _readers(graph, user, reshaped=reshaped or reshapes)


def _passes(user: fx.Node, *, reshaped: bool) -> bool:
    """Whether the operation reshapes; SH662 if it mixes channels, or takes another value too."""
    name = getattr(user.target, "__name__", user.target)
    inputs = [n for n in user.all_input_nodes if n.op not in ("call_method", "call_function") or n.target != "size"]
    if len(inputs) > 1:
        raise error("SH662", f"{name} combines it with another value")
    if user.op == "call_method":
        if user.target in RESHAPING_METHODS or user.target == "flatten":
            return True
        if user.target in RISING_METHODS and user.target not in ("squeeze", "unsqueeze"):
            return False
    elif user.target in RESHAPING_FUNCTIONS:
        return True
    elif user.target in (*RISING_FUNCTIONS, F.dropout, F.dropout2d) and not (
        reshaped and user.target in POOLING_FUNCTIONS
    ):
        return False
    raise error("SH662", f"{name} reads it")


def columns_per_channel(layer: Any, channels: int, reader: Any, shape: torch.Size) -> int:
    """How many inputs of the reader one channel of the layer feeds: channel c feeds c * n to c * n + n - 1. SH662 if
    the value that the reader gets, of this shape, is laid out in another way."""
    if isinstance(reader, CONVOLUTIONS):
        if reader.groups == 1 and isinstance(layer, CONVOLUTIONS) and shape[1] == channels == reader.in_channels:
            return 1
    elif isinstance(layer, nn.Linear):
        if shape[-1] == channels:
            return 1
    elif len(shape) == 2 and shape[1] % channels == 0:
        return int(shape[1]) // channels
    raise error("SH662", f"the order of its values before '{type(reader).__name__}' is not known")
