"""From what a job says of `shard` to what a process holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from shoal.parallel.replica import LossFunction
from shoal.parallel.shard.auto import auto_cuts
from shoal.parallel.shard.blueprint import Blueprint
from shoal.parallel.shard.cut import Cut
from shoal.parallel.shard.fsdp import FsdpCut
from shoal.parallel.shard.grid import Grid
from shoal.parallel.shard.held import Held
from shoal.parallel.shard.memory import give_back
from shoal.parallel.shard.pipeline import PipelineCut
from shoal.parallel.shard.tensor import TensorCut
from shoal.parallel.shard.uses import used_outside
from shoal.spec.shard import FsdpShard, PipelineShard, TensorShard

Sharding = FsdpShard | TensorShard | PipelineShard


def hold(
    shard: Sharding, grid: Grid, make: Callable[[], nn.Module], *, loss: LossFunction, example: Any
) -> tuple[Cut, Held]:
    """This member's part of a model, with its first weights. `make` draws from torch's generator as it is now, and is
    called once, or twice if it cannot do without memory. `example` is a batch; its values do not matter."""
    give_back()
    blueprint = Blueprint(make)
    cut = cut_up(shard, blueprint.model, grid, loss=loss, example=example)
    held = Held.of(cut)
    held.fill(blueprint)
    return cut, held


def cut_up(shard: Sharding, model: nn.Module, grid: Grid, *, loss: LossFunction, example: Any) -> Cut:
    """Of a model without memory: what is left here has some afterwards, and no values."""
    if isinstance(shard, FsdpShard):
        outside = used_outside(model, lambda trial: loss(trial, example))
        return FsdpCut(model, grid, outside=outside)
    if isinstance(shard, TensorShard):
        return TensorCut(model, grid, shard.patterns)
    cuts, seen = (shard.cuts, None) if shard.cuts != "auto" else auto_cuts(model, grid, loss, example)
    return PipelineCut(
        model,
        grid,
        cuts=cuts,
        loss=loss,
        example=example,
        microbatches=shard.microbatches,
        schedule=shard.schedule,
        seen=seen,
    )
