"""From what a job says of `shard` to what a process holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from shoal.lanes.replica import LossFunction
from shoal.sharding.auto_partition import auto_split_points
from shoal.sharding.deferred_init import DeferredInit
from shoal.sharding.device_mesh import ShardMesh
from shoal.sharding.fsdp import FsdpModel
from shoal.sharding.local_state import LocalState
from shoal.sharding.memory_limits import release_freed_memory
from shoal.sharding.param_usage import externally_used_modules
from shoal.sharding.pipeline_parallel import PipelineParallelModel
from shoal.sharding.sharded_model import ShardedModel
from shoal.sharding.tensor_parallel import TensorParallelModel
from shoal.spec.sharding import FsdpConfig, PipelineParallelConfig, TensorParallelConfig

ActiveShardingConfig = FsdpConfig | TensorParallelConfig | PipelineParallelConfig


def build_sharded_model(
    shard: ActiveShardingConfig,
    mesh: ShardMesh,
    make_model: Callable[[], nn.Module],
    *,
    loss: LossFunction,
    example: Any,
) -> tuple[ShardedModel, LocalState]:
    """This member's part of a model, with its first weights. `make` draws from torch's generator as it is now, and is
    called once, or twice if it cannot do without memory. `example` is a batch; its values do not matter."""
    release_freed_memory()
    deferred_init = DeferredInit(make_model)
    sharded_model = shard_model(shard, deferred_init.model, mesh, loss=loss, example=example)
    local_state = LocalState.of(sharded_model)
    local_state.initialise(deferred_init)
    return sharded_model, local_state


def shard_model(
    shard: ActiveShardingConfig, model: nn.Module, mesh: ShardMesh, *, loss: LossFunction, example: Any
) -> ShardedModel:
    """Of a model without memory: what is left here has some afterwards, and no values."""
    if isinstance(shard, FsdpConfig):
        outside = externally_used_modules(model, lambda trial: loss(trial, example))
        return FsdpModel(model, mesh, externally_used=outside)
    if isinstance(shard, TensorParallelConfig):
        return TensorParallelModel(model, mesh, shard.patterns)
    cuts, trace = (shard.cuts, None) if shard.cuts != "auto" else auto_split_points(model, mesh, loss, example)
    return PipelineParallelModel(
        model,
        mesh,
        split_points=cuts,
        loss=loss,
        example=example,
        microbatches=shard.microbatches,
        schedule=shard.schedule,
        trace=trace,
    )
