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
from shoal.parallel.replica import LossFunction
from shoal.parallel.shard.grid import Grid
from shoal.parallel.shard.parts import Ties, retie, ties_of
from shoal.parallel.shard.whole import Whole

Patterns = Mapping[str, str]

ALIKE, NOTHING = 2.0**-10, 2.0**-20
"""Gradients that differ by so small a part of themselves are the same but for rounding; and those that are so small a
part of the largest may be nothing but rounding."""
_ACTIVATIONS = (nn.ReLU, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.Identity, nn.Hardswish)


class TensorCut(Whole):
    """See Cut. Members work on the same lane, and what is not cut has the same bits on all of them."""

    together = True

    def __init__(self, model: nn.Module, grid: Grid, patterns: str | Patterns = "transformer") -> None:
        self.model, self.grid = model, grid
        ties = ties_of(model)
        for name, way in chosen(model, patterns, grid.ways).items():
            _cut(model.get_submodule(name), way, grid, name)
        _check_ties(model, ties)
        model.to_empty(device="cpu")
        retie(model, ties)
        whole = {n: p for n, p in model.named_parameters() if not isinstance(p, DTensor)}
        self._unproved = {name: parameter for name, parameter in whole.items() if parameter.requires_grad}
        self._largest = 0.0

    def run(self, loss: LossFunction, batch: Any, share: float) -> tuple[Tensor, Tensor | None]:
        found = super().run(loss, batch, share)
        if self._unproved:
            self._compare()
        return found

    @torch.no_grad()
    def _compare(self) -> None:
        """What is not cut has the same gradient on all members, unless it works on a part of the activations: then they
        would part without a word. Looked at until each has had a gradient. SH107 if it is not the same."""
        names = list(self._unproved)
        sizes = torch.stack([_size(self._unproved[name].grad) for name in names])
        ends = torch.cat([sizes, -sizes])
        distributed.all_reduce(ends, op=distributed.ReduceOp.MAX, group=self.grid.shard_group)
        most, least = ends[: len(names)], -ends[len(names) :]
        self._largest = max([self._largest, *most[most.isfinite()].tolist()])
        tells = most.isfinite() & (most > NOTHING * self._largest)
        for name, apart in zip(names, (tells & (most - least > ALIKE * most)).tolist(), strict=True):
            if apart:
                message = f"'{name}' has another gradient on each worker: it works on a part of the activations"
                fix = "Cut the layers before and after it by `gathered`, or use `shard: fsdp`."
                raise error("SH107", message, where="shard.patterns", fix=fix)
        self._unproved = {n: self._unproved[n] for n, done in zip(names, tells.tolist(), strict=True) if not done}


# ---- which ----


def chosen(model: nn.Module, patterns: str | Patterns, ways: int) -> dict[str, str]:
    """Which modules are cut, and how. Of several patterns that match, the first counts. SH405 if one matches none."""
    if isinstance(patterns, str):
        found = dict(_ready(model, ways, transformer=patterns == "transformer"))
        if not found:
            raise error("SH405", f"the model has nothing that `{patterns}` would cut", where="shard.patterns")
        return found
    names = [name for name, _ in model.named_modules() if name]
    found = {}
    for pattern, way in patterns.items():
        matching = fnmatch.filter(names, pattern)
        if not matching:
            fix = did_you_mean(pattern, names)
            raise error("SH405", f"the pattern '{pattern}' matches no module", where="shard.patterns", fix=fix)
        found.update({name: way for name in matching if name not in found})
    return found


def _ready(model: nn.Module, ways: int, *, transformer: bool) -> Iterator[tuple[str, str]]:
    """Linear layers, in pairs where nothing but an activation stands between two; for transformers embeddings and
    torch's own attention too. A layer with the weight of an embedding is cut along the same dimension."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)} if transformer else set()
    pairs = {id(half): way for halves in _pairs(model, ways) for half, way in zip(halves, _PAIR, strict=True)}
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


_PAIR = ("columns", "rows")


def _pairs(model: nn.Module, ways: int) -> Iterator[tuple[nn.Linear, nn.Linear]]:
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            if module.dropout.p == 0 and module.linear1.out_features % ways == 0:
                yield module.linear1, module.linear2
        elif isinstance(module, nn.Sequential):
            yield from _pairs_in(list(module), ways)


def _pairs_in(layers: list[nn.Module], ways: int) -> Iterator[tuple[nn.Linear, nn.Linear]]:
    before: nn.Linear | None = None
    for layer in layers:
        if isinstance(layer, nn.Linear):
            if before is not None:
                yield before, layer
                before = None
            elif layer.out_features % ways == 0:
                before = layer
        elif not isinstance(layer, _ACTIVATIONS):
            before = None


# ---- how ----


def _cut(module: nn.Module, way: str, grid: Grid, name: str) -> None:
    if isinstance(module, nn.MultiheadAttention) and way == "gathered":
        # All members have the same input, so that each has the whole gradient: their sum is divided again.
        held = fully_shard(module, mesh=grid.shard, reshard_after_forward=True)
        held.set_gradient_divide_factor(float(grid.ways))
        held.set_force_sum_reduction_for_comms(True)
    elif isinstance(module, nn.Linear | nn.Embedding):
        parallelize_module(module, grid.shard, _style(module, way), src_data_rank=None)
    else:
        message = f"'{name}' is a {type(module).__name__}, which cannot be cut by `{way}`"
        fix = "Name layers of type Linear or Embedding, or MultiheadAttention with `gathered`."
        raise error("SH206", message, where="shard.patterns", fix=fix)


def _size(grad: Tensor | None) -> Tensor:
    return torch.zeros((), dtype=torch.float64) if grad is None else grad.double().norm()


def _style(module: nn.Module, way: str) -> ParallelStyle:
    if way == "columns":
        return ColwiseParallel()
    if way == "gathered":
        return ColwiseParallel(output_layouts=Replicate())
    whole_input = way == "sliced" or isinstance(module, nn.Embedding)
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
