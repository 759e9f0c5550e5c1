"""Builds this rank's sharded model from the job's `shard` section, and chooses pipeline stages for `cuts: auto`."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.errors import error
from shoal.lanes.loss import LossFunction
from shoal.sharding.deferred_init import DeferredInit, named_tensors
from shoal.sharding.device_mesh import ShardMesh, broadcast
from shoal.sharding.fsdp import FsdpModel
from shoal.sharding.local_state import LocalState
from shoal.sharding.memory_limits import release_freed_memory
from shoal.sharding.param_usage import externally_used_modules
from shoal.sharding.pipeline_parallel import PipelineParallelModel
from shoal.sharding.pipeline_schedule import (
    ForwardTrace,
    balanced_partition,
    split_candidates,
    trace_forward,
    unit_costs,
)
from shoal.sharding.sharded_model import ShardedModel
from shoal.sharding.tensor_parallel import TensorParallelModel
from shoal.spec.sharding import FsdpConfig, PipelineParallelConfig, TensorParallelConfig

TIMED_PASSES = 3
ActiveShardingConfig = FsdpConfig | TensorParallelConfig | PipelineParallelConfig


def build_sharded_model(
    shard: ActiveShardingConfig,
    mesh: ShardMesh,
    make_model: Callable[[], nn.Module],
    *,
    loss: LossFunction,
    example: Any,
) -> tuple[ShardedModel, LocalState]:
    """This rank's shards of a model, with initial weights. `make_model` draws from torch's generator, and is called
    once, or twice if initialisation cannot be deferred. `example` is a batch, whose values do not matter."""
    release_freed_memory()
    deferred_init = DeferredInit(make_model)
    sharded_model = shard_model(shard, deferred_init.model, mesh, loss=loss, example=example)
    local_state = LocalState.of(sharded_model)
    local_state.initialise(deferred_init)
    return sharded_model, local_state


def shard_model(
    shard: ActiveShardingConfig, model: nn.Module, mesh: ShardMesh, *, loss: LossFunction, example: Any
) -> ShardedModel:
    """Shard a model on the meta device. Afterwards this rank's shards have memory, but no values."""
    if isinstance(shard, FsdpConfig):
        externally_used = externally_used_modules(model, lambda trial: loss(trial, example))
        return FsdpModel(model, mesh, externally_used=externally_used)
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


# ---- `cuts: auto` ----


def auto_split_points(
    model: nn.Module, mesh: ShardMesh, loss: LossFunction, example: Any
) -> tuple[list[str], ForwardTrace]:
    """Split points of a model on the meta device, for stages of equal cost. One rank measures, so all ranks agree."""
    calls: dict[str, Any] = {}
    trace = trace_with_inputs(model, loss, example, calls)
    names = split_candidates(model, trace)
    if len(names) < mesh.replica_size - 1:
        fix = "Name modules under `shard.cuts`, ask for a smaller `shard.size`, or use `shard: fsdp`."
        raise error("SH405", f"the model has only {len(names)} places to cut", where="shard.cuts", fix=fix)
    times = torch.zeros(len(names) + 1, dtype=torch.float64)
    if mesh.replica_rank == mesh.shard_rank == 0:
        times[1:] = torch.tensor(forward_seconds(model, names, calls), dtype=torch.float64)
    broadcast([times], 0, torch.distributed.group.WORLD)  # type: ignore[arg-type]
    starts = balanced_partition(unit_costs(stage_bytes(model, trace, names), times.tolist()), mesh.replica_size)
    return [names[start - 1] for start in starts], trace


def trace_with_inputs(
    model: nn.Module, loss: LossFunction, example: Any, module_inputs: dict[str, Any]
) -> ForwardTrace:
    """Trace the model, and record the arguments of each module's call."""
    hooks = []
    for name, module in model.named_modules():

        def record(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            module_inputs[name] = (args, kwargs)

        hooks.append(module.register_forward_pre_hook(record, with_kwargs=True))
    try:
        return trace_forward(model, lambda: loss(model, example))
    finally:
        for hook in hooks:
            hook.remove()


def stage_bytes(model: nn.Module, trace: ForwardTrace, names: Sequence[str]) -> list[int]:
    """Bytes of each stage if the model is split before every one of these modules."""
    tensors = named_tensors(model)
    sizes = [0] * (len(names) + 1)
    for name, stages in trace.stages_of(names).items():
        for stage in stages:
            sizes[stage] += tensors[name].nbytes
    return sizes


def forward_seconds(model: nn.Module, names: Sequence[str], module_inputs: dict[str, Any]) -> list[float]:
    """Forward time of each module, alone on this machine; equal modules with equal inputs are measured once."""
    known: dict[str, float] = {}
    seconds = []
    for name in names:
        module = model.get_submodule(name)
        signature = f"{module} {pytree.tree_map(_shape_signature, module_inputs[name])}"
        if signature not in known:
            known[signature] = _time_forward(module, *module_inputs[name])
        seconds.append(known[signature])
    return seconds


def _shape_signature(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf


@torch.no_grad()
def _time_forward(module: nn.Module, args: Any, kwargs: Any) -> float:
    trial = copy.deepcopy(module).to_empty(device="cpu")
    for tensor in [*trial.parameters(), *trial.buffers()]:
        tensor.zero_()
    args, kwargs = pytree.tree_map(_zeros_like, (args, kwargs))
    generator = torch.get_rng_state()
    best = float("inf")
    for _ in range(TIMED_PASSES):
        start = time.perf_counter()
        trial(*args, **kwargs)
        best = min(best, time.perf_counter() - start)
    torch.set_rng_state(generator)
    return best


def _zeros_like(leaf: Any) -> Any:
    return torch.zeros_like(leaf, device="cpu", requires_grad=False) if isinstance(leaf, Tensor) else leaf
