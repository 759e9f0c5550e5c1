"""`shard: tensor`: matrices are sharded, and every rank multiplies with its shard.

Between `columns` and `rows` each rank has its own part of the activations. The code there must not depend on their
width, have no trainable parameters, and draw no random numbers that must differ between ranks: dropout has the same
mask on each. `gathered` and `sliced` layers take and return whole activations: any code may surround them, even
dropout, which then draws the same numbers on every rank.
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
from shoal.lanes.loss import LossFunction
from shoal.sharding.device_mesh import ShardMesh
from shoal.sharding.local_shards import Ties, find_ties, retie
from shoal.sharding.sharded_model import CallableShardedModel

Patterns = Mapping[str, str]

RELATIVE_TOLERANCE, NEGLIGIBLE = 2.0**-10, 2.0**-20
"""Relative difference of gradients that counts as rounding; and the fraction of the largest gradient's norm below which
a gradient may be nothing but rounding."""
_ACTIVATIONS = (nn.ReLU, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.Identity, nn.Hardswish)


class TensorParallelModel(CallableShardedModel):
    """See ShardedModel. All ranks run the same lane; tensors that are not sharded have the same bits on every rank."""

    shares_lane = True

    def __init__(self, model: nn.Module, mesh: ShardMesh, patterns: str | Patterns = "transformer") -> None:
        self.model, self.mesh = model, mesh
        ties = find_ties(model)
        for name, style in select_modules(model, patterns, mesh.replica_size).items():
            _parallelise(model.get_submodule(name), style, mesh, name)
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
        """Check that a parameter that is not sharded has the same gradient on all ranks. If it works on a part of the
        activations, ranks would silently diverge. Each parameter is checked once, with its first gradient. SH107 if the
        gradients differ."""
        names = list(self._unverified)
        norms = torch.stack([_gradient_norm(self._unverified[name].grad) for name in names])
        ends = torch.cat([norms, -norms])
        distributed.all_reduce(ends, op=distributed.ReduceOp.MAX, group=self.mesh.shard_group)
        largest, smallest = ends[: len(names)], -ends[len(names) :]
        self._largest_norm = max([self._largest_norm, *largest[largest.isfinite()].tolist()])
        significant = largest.isfinite() & (largest > NEGLIGIBLE * self._largest_norm)
        for name, differs in zip(
            names, (significant & (largest - smallest > RELATIVE_TOLERANCE * largest)).tolist(), strict=True
        ):
            if differs:
                message = f"'{name}' has another gradient on each worker: it works on a part of the activations"
                fix = "Cut the layers before and after it by `gathered`, or use `shard: fsdp`."
                raise error("SH107", message, where="shard.patterns", fix=fix)
        self._unverified = {
            n: self._unverified[n] for n, done in zip(names, significant.tolist(), strict=True) if not done
        }


# ---- selection ----


def select_modules(model: nn.Module, patterns: str | Patterns, shard_count: int) -> dict[str, str]:
    """The modules that are sharded, with their styles. The first matching pattern wins. SH405 if one matches none."""
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
    """Linear layers, in pairs if only an activation is between them; for transformers also embeddings and torch's own
    attention. A layer that shares an embedding's weight is sharded along the same dimension."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} if transformer else set()
    pairs = {
        id(half): style
        for halves in _column_row_pairs(model, shard_count)
        for half, style in zip(halves, _PAIR_STYLES, strict=True)
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
    first: nn.Linear | None = None
    for layer in layers:
        if isinstance(layer, nn.Linear):
            if first is not None:
                yield first, layer
                first = None
            elif layer.out_features % shard_count == 0:
                first = layer
        elif not isinstance(layer, _ACTIVATIONS):
            first = None


# ---- sharding ----


def _parallelise(module: nn.Module, style: str, mesh: ShardMesh, name: str) -> None:
    if isinstance(module, nn.MultiheadAttention) and style == "gathered":
        # all ranks have the same input, so each has the whole gradient: their sum is divided by the number of ranks
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
