"""Applies the shape steps of a recipe to a model: the same function builds a model and cuts trained weights."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from shoal.compression.heads import FewerHeads, WideLinear
from shoal.compression.rounding import Rounded, Shared
from shoal.compression.units import cut_units
from shoal.errors import ShoalError, error
from shoal.spec.compression.steps import (
    CutStep,
    DenseStep,
    FoldStep,
    Kept,
    LowRankStep,
    MaskStep,
    RoundStep,
    ShapeStep,
    ShareStep,
    parse_indices,
)

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def apply_steps(model: nn.Module, steps: Iterable[ShapeStep]) -> nn.Module:
    """The model itself, changed in place. SH660 if a step does not fit it: nothing is guessed."""
    for step in steps:
        if isinstance(step, DenseStep):
            for name in step.layers:
                _replace(model, name, _dense(_own_layer(model, name), name=name))
        elif isinstance(step, FoldStep):
            for layer, norm in step.pairs:
                _fold(model, layer, norm)
        elif isinstance(step, CutStep):
            for name, kept in step.layers.items():
                _cut_layer(model, name, kept)
        elif isinstance(step, LowRankStep):
            for name, rank in step.layers.items():
                _replace(model, name, _factorised(_own_layer(model, name), rank, name=name))
        elif isinstance(step, MaskStep):
            for name in step.layers:
                _parametrize(_layer(model, name), Masked(_layer(model, name).weight), name=name)
        else:
            _restrict(model, step)
    return model


def computed_parameter(layer: nn.Module) -> str | None:
    """The parameter that the layer computes from others at every call, as under weight_norm or with rounded weights.
    None if there is none: only such a layer can be changed."""
    if parametrize.is_parametrized(layer):
        return str(next(iter(layer.parametrizations)))  # type: ignore[arg-type]
    names = {name.removesuffix("_orig").removesuffix("_g") for name in layer._parameters} - layer._parameters.keys()
    found = (name for name in sorted(names) if isinstance(getattr(layer, name, None), Tensor))
    return next(found, None)  # torch's older weight_norm, spectral_norm and pruning


def find_layer(model: nn.Module, name: str) -> nn.Module | None:
    return dict(model.named_modules()).get(name)


def _layer(model: nn.Module, name: str) -> Any:
    found = find_layer(model, name)
    if found is None:
        raise _misfit(name, "the model has no such layer")
    return found


def _own_layer(model: nn.Module, name: str) -> Any:
    """A layer whose parameters are its own, so that they can be replaced."""
    layer = _layer(model, name)
    if (part := computed_parameter(layer)) is not None:
        raise _misfit(name, computed_reason(part))
    return layer


def computed_reason(parameter: str) -> str:
    return f"its {parameter} is computed from other parameters"


def _misfit(name: str, why: str) -> ShoalError:
    return error("SH660", f"'{name}': {why}", where="shape")


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, new.train(model.get_submodule(name).training))


# ---- transposed layers ----


def dense_steps(model: nn.Module) -> list[DenseStep]:
    """The step that turns transposed layers into dense ones; empty if there are none."""
    found = [name for name, layer in model.named_modules() if _is_transposed(layer)]
    return [DenseStep(layers=found)] if found else []


def _is_transposed(layer: nn.Module) -> bool:
    """A model that has such a layer has imported its class."""
    return isinstance(layer, getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", ()))


def _dense(layer: Any, *, name: str) -> nn.Linear:
    if not _is_transposed(layer):
        raise _misfit(name, f"a {type(layer).__name__} has no transposed weight")
    inputs, outputs = layer.weight.shape
    made = nn.Linear(inputs, outputs, device="meta")
    made.weight, made.bias = _like(layer.weight, layer.weight.detach().T.contiguous()), layer.bias
    return made


# ---- batch norm ----


def _fold(model: nn.Module, layer_name: str, norm_name: str) -> None:
    """Fold an evaluating batch norm into the layer before it, computed in float64."""
    layer, norm = _own_layer(model, layer_name), _own_layer(model, norm_name)
    fits = isinstance(layer, (nn.Linear, *CONVOLUTIONS)) and isinstance(norm, BATCH_NORMS)
    if not fits or norm.num_features != len(layer.weight) or norm.running_var is None:
        raise _misfit(layer_name, f"'{norm_name}' cannot be folded into it")
    with torch.no_grad():
        scale = (norm.running_var.double() + norm.eps).rsqrt()
        shift = -norm.running_mean.double() * scale
        if norm.affine:
            scale, shift = scale * norm.weight.double(), shift * norm.weight.double() + norm.bias.double()
        bias = 0.0 if layer.bias is None else layer.bias.double()
        column = scale.reshape(-1, *(1 for _ in layer.weight.shape[1:]))
        layer.weight = _like(layer.weight, layer.weight.double() * column)
        layer.bias = _like(layer.weight, bias * scale + shift)
    _replace(model, norm_name, nn.Identity())


def _like(old: Tensor, values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.to(old.dtype), requires_grad=old.requires_grad)


# ---- cutting ----


def _cut_layer(model: nn.Module, name: str, kept: Kept) -> None:
    layer = _own_layer(model, name)
    if kept.heads is not None:
        if not isinstance(layer, nn.MultiheadAttention):
            raise _misfit(name, f"a {type(layer).__name__} has no heads")
        heads = parse_indices(kept.heads)
        _check_indices(layer, name, (heads, layer.num_heads))
        _replace(model, name, FewerHeads(layer, heads))
    elif kept.wide is not None:
        if not isinstance(layer, nn.Linear):
            raise _misfit(name, f"a {type(layer).__name__} cannot keep its width")
        widths = layer.out_features, layer.in_features
        _cut(layer, kept, name=name)
        _replace(model, name, WideLinear(layer, kept, widths))
    else:
        _cut(layer, kept, name=name)


def _cut(layer: nn.Module, kept: Kept, *, name: str) -> None:
    out = None if kept.out is None else parse_indices(kept.out)
    inputs = None if kept.inputs is None else parse_indices(kept.inputs)
    with torch.no_grad():
        if isinstance(layer, nn.Linear):
            _check_indices(layer, name, (out, layer.out_features), (inputs, layer.in_features))
            _compensate(layer, kept, name=name)
            _cut_weight(layer, out, inputs)
            layer.out_features, layer.in_features = len(layer.weight), layer.weight.shape[1]
        elif isinstance(layer, CONVOLUTIONS):
            _cut_convolution(layer, out, inputs, kept, name=name)
        elif isinstance(layer, (*BATCH_NORMS, nn.LayerNorm)):
            _cut_norm(layer, out, name=name)
        elif isinstance(layer, nn.Embedding):
            _check_indices(layer, name, (out, layer.embedding_dim), (inputs, 0))
            if out is not None:
                layer.weight = _like(layer.weight, layer.weight[:, out])
                layer.embedding_dim = len(out)
        elif isinstance(layer, nn.RNNBase):
            _cut_recurrent(layer, out, inputs, name=name)
        else:
            raise _misfit(name, f"a {type(layer).__name__} cannot be cut")


def _cut_recurrent(layer: nn.RNNBase, out: list[int] | None, inputs: list[int] | None, *, name: str) -> None:
    if layer.num_layers > 1 or layer.bidirectional or layer.proj_size or inputs is not None:
        raise _misfit(name, "only the units of one recurrent layer of one direction can be cut")
    _check_indices(layer, name, (out, layer.hidden_size))
    if out is not None:
        cut_units(layer, out)


def _cut_weight(layer: Any, out: list[int] | None, inputs: list[int] | None) -> None:
    weight = layer.weight if out is None else layer.weight[out]
    layer.weight = _like(layer.weight, weight if inputs is None else weight[:, inputs])
    if layer.bias is not None and out is not None:
        layer.bias = _like(layer.bias, layer.bias[out])


def _cut_convolution(layer: Any, out: list[int] | None, inputs: list[int] | None, kept: Kept, *, name: str) -> None:
    depthwise = layer.groups > 1
    if depthwise and (layer.groups != layer.in_channels or layer.in_channels != layer.out_channels):
        raise _misfit(name, "a convolution with groups of several channels cannot be cut")
    if depthwise and inputs is not None and inputs != (out or inputs):
        raise _misfit(name, "its groups have one channel each: inputs and outputs go together")
    _check_indices(layer, name, (out, layer.out_channels), (inputs, layer.in_channels))
    _compensate(layer, kept, name=name)
    if depthwise:
        both = out if out is not None else inputs
        _cut_weight(layer, both, None)
        layer.groups = layer.in_channels = layer.out_channels = len(layer.weight)
    else:
        _cut_weight(layer, out, inputs)
        layer.out_channels, layer.in_channels = layer.weight.shape[:2]


def _compensate(layer: Any, kept: Kept, *, name: str) -> None:
    """Merge equal inputs, and add what constant inputs contribute to the bias: a sum over the kernel."""
    weight = layer.weight.double()
    for column, into in kept.merged.items():
        weight[:, into] += weight[:, column]
    layer.weight = _like(layer.weight, weight)
    if kept.constants:
        if layer.bias is None:
            layer.bias = _like(layer.weight, layer.weight.new_zeros(len(layer.weight)))
        added = sum(weight[:, c].reshape(len(weight), -1).sum(1) * value for c, value in kept.constants.items())
        layer.bias = _like(layer.bias, layer.bias.double() + added)


def _cut_norm(layer: Any, out: list[int] | None, *, name: str) -> None:
    size = layer.normalized_shape[-1] if isinstance(layer, nn.LayerNorm) else layer.num_features
    _check_indices(layer, name, (out, size), (None, 0))
    if out is None:
        return
    if isinstance(layer, nn.LayerNorm):
        layer.normalized_shape = (*layer.normalized_shape[:-1], len(out))
    else:
        layer.num_features = len(out)
    for part in ("weight", "bias"):
        if getattr(layer, part, None) is not None:
            setattr(layer, part, _like(getattr(layer, part), getattr(layer, part)[..., out]))
    for part in ("running_mean", "running_var"):
        if getattr(layer, part, None) is not None:
            setattr(layer, part, getattr(layer, part)[out].clone())


def _check_indices(layer: nn.Module, name: str, *sides: tuple[list[int] | None, int]) -> None:
    for indices, size in sides:
        if indices is not None and indices[-1] >= size:
            raise _misfit(name, f"{type(layer).__name__} of {size} has no {indices[-1]}")


# ---- low rank, masks, rounding ----


def low_rank_step(model: nn.Module, share: float) -> tuple[LowRankStep | None, dict[str, str]]:
    """The dense layers that become products of this share of their rank, where that has fewer weights; None if there
    are none. Layers that compute more than their class says stay, with the reason."""
    modules = [module for _, module in model.named_modules(remove_duplicate=False)]
    owners = Counter(id(p) for module in modules for p in module.parameters(recurse=False))
    ranks: dict[str, int] = {}
    refused: dict[str, str] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        rows, columns = layer.weight.shape
        rank = max(int(min(rows, columns) * share), 1)
        if (part := computed_parameter(layer)) is not None:
            refused[name] = computed_reason(part)
        elif type(layer) is not nn.Linear:
            refused[name] = f"a {type(layer).__name__} is more than a dense layer"
        elif owners[id(layer.weight)] > 1:
            refused[name] = "another layer has the same weight"
        elif rank * (rows + columns) < rows * columns:
            ranks[name] = rank
    return (LowRankStep(layers=ranks) if ranks else None), refused


class Product(nn.Sequential):
    """A dense layer as two thinner ones. Code that reads its weight, as torch's encoder layers do, gets the product."""

    @property
    def weight(self) -> Tensor:
        layers: Any = self
        found: Tensor = layers[1].weight @ layers[0].weight
        return found

    @property
    def bias(self) -> Tensor | None:
        layers: Any = self
        found: Tensor | None = layers[1].bias
        return found


def _factorised(layer: Any, rank: int, *, name: str) -> nn.Module:
    """Two layers whose product is the best approximation of that rank (Eckart and Young), computed in float64."""
    if not isinstance(layer, nn.Linear) or rank > min(layer.weight.shape):
        raise _misfit(name, f"it cannot have rank {rank}")
    u, s, v = torch.linalg.svd(layer.weight.detach().double(), full_matrices=False)
    root = s[:rank].sqrt()
    first = nn.Linear(layer.in_features, rank, bias=False)
    second = nn.Linear(rank, layer.out_features, bias=layer.bias is not None)
    first.weight = _like(layer.weight, root[:, None] * v[:rank])
    second.weight = _like(layer.weight, u[:, :rank] * root)
    if layer.bias is not None:
        second.bias = layer.bias
    return Product(first, second)


class Masked(nn.Module):
    """Multiplies weights by a mask, which is saved with them. The mask of trained weights is where they are not
    zero."""

    mask: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", (weight.detach() != 0).to(weight.dtype))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


def _parametrize(layer: Any, parametrization: nn.Module, *, name: str) -> None:
    if isinstance(layer, Product) or not isinstance(getattr(layer, "weight", None), Tensor):
        raise _misfit(name, f"a {type(layer).__name__} has no weight")
    if (part := computed_parameter(layer)) is not None and not _is_held(layer):
        raise _misfit(name, computed_reason(part))
    parametrize.register_parametrization(layer, "weight", parametrization, unsafe=True)


def _is_held(layer: Any) -> bool:
    """Whether a step has parametrized the layer, and nothing else has."""
    return parametrize.is_parametrized(layer) and all(
        isinstance(one, Masked | Rounded | Shared) for parts in layer.parametrizations.values() for one in parts
    )


def _restrict(model: nn.Module, step: RoundStep | ShareStep) -> None:
    for name, bits in step.layers.items():
        layer = _layer(model, name)
        made = Rounded(bits) if isinstance(step, RoundStep) else Shared(layer.weight, bits)
        _parametrize(layer, made, name=name)


def count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def plain_state(model: nn.Module, held: Iterable[str]) -> Mapping[str, Tensor]:
    """The state of the model with the weights that were held under their plain names, at the values that are used."""
    state = dict(model.state_dict())
    for name in held:
        weight: Any = model.get_submodule(name).weight
        prefix = f"{name}." if name else ""
        state = {k: v for k, v in state.items() if not k.startswith(f"{prefix}parametrizations.weight.")}
        state[f"{prefix}weight"] = weight.detach()
    return state
