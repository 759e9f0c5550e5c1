"""Removal without an error: batch norms folded, and outputs of layers that are constant or equal.

Bounds of activations decide. Bounds that hold for a whole box of inputs make the result equal for every input of the
box, in exact arithmetic; bounds that were observed on samples make it equal on these samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from shoal.compression.bounds import Bounds, propagate, trace
from shoal.compression.layer_graph import Reader, batch_norms_after, columns_per_channel, layers_of, readers_of
from shoal.compression.shape import CONVOLUTIONS, computed_parameter, computed_reason
from shoal.errors import ShoalError, describe_exception, error
from shoal.spec.compression.steps import CutStep, FoldStep, Kept, format_indices


@torch.no_grad()
def fold_step(model: nn.Module, inputs: tuple[Any, ...]) -> FoldStep | None:
    """The batch norms that can be folded; None if there are none. A norm acts on the second dimension of what the layer
    before it gives for these inputs: for a dense layer on sequences that is not the one of its outputs."""
    graph = trace(model.eval())
    pairs = batch_norms_after(graph)
    if not pairs:
        return None
    try:
        ShapeProp(graph).propagate(*inputs)
    except Exception as failure:
        what = describe_exception(failure)
        raise error("SH662", f"its shapes cannot be found: {what}", where=type(model).__name__) from failure
    fits = {name for node, name, layer in layers_of(graph) if len(node.meta["tensor_meta"].shape) == layer.weight.dim()}
    pairs = [pair for pair in pairs if pair[0] in fits]
    return FoldStep(pairs=pairs) if pairs else None


@dataclass
class Removal:
    """Outputs of one layer that can go. `constants` and `merged` are by reading layer and its input."""

    layer: str
    removed: set[int] = field(default_factory=set)
    constants: dict[str, dict[int, float]] = field(default_factory=dict)
    merged: dict[str, dict[int, int]] = field(default_factory=dict)
    columns: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FoundCut:
    """`step` is None if nothing can go. `removed` counts outputs by layer; `refused` has reasons by layer."""

    step: CutStep | None
    removed: Mapping[str, int]
    refused: Mapping[str, str]


def cut_from_box(model: nn.Module, box: Bounds) -> FoundCut:
    """What can be removed with a proof for every input of the box."""
    graph = trace(model.eval())
    found = propagate(graph, box)
    return _cut(graph, found.found, dict(found.refused))


def cut_from_samples(model: nn.Module, batches: Iterable[Tensor]) -> FoundCut:
    """What never changes on these samples. Smallest and largest values do not depend on the order of the samples."""
    graph = trace(model.eval())
    observed = _Observer(graph)
    with torch.no_grad():
        for batch in batches:
            observed.run(batch)
    kept = {name: bounds for name, bounds in observed.found.items() if name not in observed.changing}
    return _cut(graph, kept, dict.fromkeys(observed.changing, "its shape changes with the number of samples"))


class _Observer(fx.Interpreter):
    """Runs the graph on batches and keeps the smallest and largest value of every element. `changing`: values whose
    shape is another one in another batch."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.found: dict[str, Bounds] = {}
        self.changing: set[str] = set()

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and value.dim() > 1 and value.is_floating_point():
            low, high = value.amin(0, keepdim=True).double(), value.amax(0, keepdim=True).double()
            old = self.found.setdefault(n.name, Bounds(low, high))
            if old.low.shape != low.shape:  # samples are not first
                self.changing.add(n.name)
            else:
                self.found[n.name] = Bounds(torch.minimum(low, old.low), torch.maximum(high, old.high))
        return value


def _cut(graph: fx.GraphModule, found: Mapping[str, Bounds], refused: dict[str, str]) -> FoundCut:
    removals = []
    for name, layer in graph.named_modules():
        if (part := computed_parameter(layer)) is not None:
            refused[name] = computed_reason(part)
    for node, name, layer in layers_of(graph):
        try:
            removal = _removal(graph, node, name, layer, found)
        except ShoalError as failure:
            refused[name] = failure.message
            continue
        if removal.removed:
            removals.append(removal)
    sizes = {name: len(layer.weight) for _, name, layer in layers_of(graph)}
    step = CutStep(layers=_kept_layers(graph, removals, sizes)) if removals else None
    return FoundCut(step, {one.layer: len(one.removed) for one in removals}, refused)


def _removal(graph: fx.GraphModule, node: fx.Node, name: str, layer: Any, found: Mapping[str, Bounds]) -> Removal:
    """The outputs of the layer that all its readers can do without."""
    readers, channels, removal = readers_of(graph, node), len(layer.weight), Removal(name)
    possible = set(range(channels))
    constants: dict[str, dict[int, list[float]]] = {}
    for reader in readers:
        if reader.node not in found:
            raise error("SH662", "its values have no bounds")
        target = graph.get_submodule(reader.layer)
        value = found[reader.node]
        columns = columns_per_channel(layer, channels, target, value.low.shape)
        removal.columns[reader.layer] = columns
        constants[reader.layer] = _constant_channels(value, channels, columns, target)
        possible &= constants[reader.layer].keys()
    twins = _twins(layer, readers, possible)
    if len(possible) + len(twins) >= channels:
        possible.discard(min(possible))  # a layer keeps at least one output
    removal.removed = possible | twins.keys()
    for where, values in constants.items():
        n = removal.columns[where]
        flat = {c * n + i: v for c in sorted(possible) for i, v in enumerate(values[c])}
        removal.constants[where] = {column: v for column, v in flat.items() if v != 0}
        removal.merged[where] = {c * n + i: into * n + i for c, into in sorted(twins.items()) for i in range(n)}
    return removal


def _constant_channels(value: Bounds, channels: int, columns: int, reader: Any) -> dict[int, list[float]]:
    """The values that each channel brings to the reader, for channels that never change."""
    is_conv = isinstance(reader, CONVOLUTIONS)
    if is_conv:
        low, high = (t[0].reshape(channels, -1) for t in (value.low, value.high))
    else:
        apart = (t.reshape(-1, channels, columns).movedim(1, 0) for t in (value.low, value.high))
        low, high = (t.reshape(channels, -1) for t in apart)
    found = {}
    for channel in (low == high).all(1).nonzero()[:, 0].tolist():
        row = low[channel].reshape(-1, 1 if is_conv else columns)
        same_everywhere = bool((row == row[0]).all())
        padded = is_conv and (isinstance(reader.padding, str) or any(reader.padding))
        if same_everywhere and (not padded or float(row[0, 0]) == 0):
            found[channel] = row[0].tolist()
    return found


def _twins(layer: Any, readers: list[Reader], gone: set[int]) -> dict[int, int]:
    """Outputs with exactly the weights and bias of an earlier one, and that earlier one."""
    rows = layer.weight.detach().flatten(1)
    if layer.bias is not None:
        rows = torch.cat([rows, layer.bias.detach()[:, None]], 1)
    first: dict[bytes, int] = {}
    found = {}
    for index, row in enumerate(rows.cpu().numpy()):
        earlier = first.setdefault(row.tobytes(), index)
        if earlier != index and index not in gone and earlier not in gone:
            found[index] = earlier
    return found


def _kept_layers(graph: fx.GraphModule, removals: list[Removal], sizes: Mapping[str, int]) -> dict[str, Kept]:
    kept: dict[str, dict[str, Any]] = {}
    for removal in removals:
        out = [i for i in range(sizes[removal.layer]) if i not in removal.removed]
        kept.setdefault(removal.layer, {})["out"] = format_indices(out)
        for reader, n in removal.columns.items():
            columns = [c * n + i for c in out for i in range(n)]
            kept.setdefault(reader, {}).update(
                inputs=format_indices(columns), constants=removal.constants[reader], merged=removal.merged[reader]
            )
    return {name: Kept(**parts) for name, parts in kept.items()}
