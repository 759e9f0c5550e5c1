"""`shard: tensor`: matrices are cut, and every member multiplies with its part of them.

What lies between `columns` and `rows` is a member's own part of the activations, and the model's code must not mind
its width, have no trained parameters, and draw no numbers that must differ from part to part: dropout has the same mask
for each. `gathered` and `sliced` layers take and give whole activations: any code may stand around them, dropout
included, which then draws the same numbers everywhere.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from shoal.errors import did_you_mean, error
from shoal.lanes.replica import LossFunction
from shoal.sharding.callable_model import CallableShardedModel
from shoal.sharding.device_mesh import ShardMesh
from shoal.sharding.local_shards import Ties, find_ties, retie

Patterns = Mapping[str, str]

RELATIVE_TOLERANCE, NEGLIGIBLE = 2.0**-10, 2.0**-20
"""Gradients that differ by so small a part of themselves are the same but for rounding; and those that are so small a
part of the largest may be nothing but rounding."""
_ACTIVATIONS = (nn.ReLU, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.Identity, nn.Hardswish)


class TensorParallelModel(CallableShardedModel):
    """See Cut. Members work on the same lane, and what is not cut has the same bits on all of them."""

    shares_lane = True

    def __init__(self, model: nn.Module, mesh: ShardMesh, patterns: str | Patterns = "transformer") -> None:
        self.model, self.mesh = model, mesh
        ties = find_ties(model)
        for name, way in select_modules(model, patterns, mesh.replica_size).items():
            _parallelise(model.get_submodule(name), way, mesh, name)
        _check_ties(model, ties)
        model.to_empty(device="cpu")
        retie(model, ties)
        whole = {n: p for n, p in model.named_parameters() if not isinstance(p, DTensor)}
        self._unverified = {name: parameter for name, parameter in whole.items() if parameter.requires_grad}
        self._largest_norm = 0.0

    def forward_backward(self, loss: LossFunction, batch: Any, share: float) -> tuple[Tensor, Tensor | None]:
        found = super().forward_backward(loss, batch, share)
        if self._unverified:
            self._verify_replicated()
        return found

    @torch.no_grad()
    def _verify_replicated(self) -> None:
        """What is not cut has the same gradient on all members, unless it works on a part of the activations: then they
        would part without a word. Looked at until each has had a gradient. SH107 if it is not the same."""
        names = list(self._unverified)
        sizes = torch.stack([_gradient_norm(self._unverified[name].grad) for name in names])
        ends = torch.cat([sizes, -sizes])
        distributed.all_reduce(ends, op=distributed.ReduceOp.MAX, group=self.mesh.shard_group)
        most, least = ends[: len(names)], -ends[len(names) :]
        self._largest_norm = max([self._largest_norm, *most[most.isfinite()].tolist()])
        tells = most.isfinite() & (most > NEGLIGIBLE * self._largest_norm)
        for name, apart in zip(names, (tells & (most - least > RELATIVE_TOLERANCE * most)).tolist(), strict=True):
            if apart:
                message = f"'{name}' has another gradient on each worker: it works on a part of the activations"
                fix = "Cut the layers before and after it by `gathered`, or use `shard: fsdp`."
                raise error("SH107", message, where="shard.patterns", fix=fix)
        self._unverified = {n: self._unverified[n] for n, done in zip(names, tells.tolist(), strict=True) if not done}


# ---- which ----


def select_modules(model: nn.Module, patterns: str | Patterns, shard_count: int) -> dict[str, str]:
    """Which modules are cut, and how. Of several patterns that match, the first counts. SH405 if one matches none."""
    if isinstance(patterns, str):
        found = dict(_preset_styles(model, shard_count, transformer=patterns == "transformer"))
        if not found:
            raise error("SH405", f"the model has nothing that `{patterns}` would cut", where="shard.patterns")
        return found
    names = [name for name, _ in model.named_modules() if name]
    found = {}
    for pattern, style in patterns.items():
        matching = fnmatch.filter(names, pattern)
        if not matching:
            fix = did_you_mean(pattern, names)
            raise error("SH405", f"the pattern '{pattern}' matches no module", where="shard.patterns", fix=fix)
        found.update({name: style for name in matching if name not in found})
    return found


def _preset_styles(model: nn.Module, shard_count: int, *, transformer: bool) -> Iterator[tuple[str, str]]:
    """Linear layers, in pairs where nothing but an activation stands between two; for transformers embeddings and
    torch's own attention too. A layer with the weight of an embedding is cut along the same dimension."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} if transformer else set()
    pairs = {
        id(half): way
        for halves in _column_row_pairs(model, shard_count)
        for half, way in zip(halves, _PAIR_STYLES, strict=True)
    }
    attention: list[str] = []
    for name, module in model.named_modules():
        if transformer and isinstance(module, nn.MultiheadAttention):
            attention.append(f"{name}.")
            yield name, "gathered"
        elif name.startswith(tuple(attention)):
            continue
        elif isinstance(module, nn.Linear):
            yield name, "sliced" if id(module.weight) in embeddings else pairs.get(id(module), "gathered")
        elif transformer and isinstance(module, nn.Embedding):
            yield name, "gathered"


_PAIR_STYLES = ("columns", "rows")


def _column_row_pairs(model: nn.Module, shard_count: int) -> Iterator[tuple[nn.Linear, nn.Linear]]:
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            if module.dropout.p == 0 and module.linear1.out_features % shard_count == 0:
                yield module.linear1, module.linear2
        elif isinstance(module, nn.Sequential):
            yield from _pairs_in_sequence(list(module), shard_count)


def _pairs_in_sequence(layers: list[nn.Module], shard_count: int) -> Iterator[tuple[nn.Linear, nn.Linear]]:
    before: nn.Linear | None = None
    for layer in layers:
        if isinstance(layer, nn.Linear):
            if before is not None:
                yield before, layer
                before = None
            elif layer.out_features % shard_count == 0:
                before = layer
        elif not isinstance(layer, _ACTIVATIONS):
            before = None


# ---- how ----


def _parallelise(module: nn.Module, style: str, mesh: ShardMesh, name: str) -> None:
    if isinstance(module, nn.MultiheadAttention) and style == "gathered":
        # All members have the same input, so that each has the whole gradient: their sum is divided again.
        sharded = fully_shard(module, mesh=mesh.shard_mesh, reshard_after_forward=True)
        sharded.set_gradient_divide_factor(float(mesh.replica_size))
        sharded.set_force_sum_reduction_for_comms(True)
    elif isinstance(module, nn.Linear | nn.Embedding):
        parallelize_module(module, mesh.shard_mesh, _parallel_style(module, style), src_data_rank=None)
    else:
        message = f"'{name}' is a {type(module).__name__}, which cannot be cut by `{style}`"
        fix = "Name layers of type Linear or Embedding, or MultiheadAttention with `gathered`."
        raise error("SH206", message, where="shard.patterns", fix=fix)


def _gradient_norm(grad: Tensor | None) -> Tensor:
    return torch.zeros((), dtype=torch.float64) if grad is None else grad.double().norm()


def _parallel_style(module: nn.Module, style: str) -> ParallelStyle:
    if style == "columns":
        return ColwiseParallel()
    if style == "gathered":
        return ColwiseParallel(output_layouts=Replicate())
    whole_input = style == "sliced" or isinstance(module, nn.Embedding)
    return RowwiseParallel(input_layouts=Replicate() if whole_input else None)


def _check_ties(model: nn.Module, ties: Ties) -> None:
    for name, original in ties.items():
        one, other = model.get_parameter(name), model.get_parameter(original)
        if _placements(one) != _placements(other):
            message = f"'{name}' and '{original}' are one parameter, and their modules are cut in different ways"
            fix = "Cut an embedding by `gathered` and the layer that has its weight by `sliced`."
            raise error("SH107", message, where="shard.patterns", fix=fix)


def _placements(tensor: Tensor) -> Any:
    return tensor.placements if isinstance(tensor, DTensor) else None
