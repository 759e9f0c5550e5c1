"""Builds this worker's shard of a job's model, anew for every view."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from shoal.checkpoint.export import open_weights
from shoal.data.batch import Batch
from shoal.errors import error
from shoal.lanes.clipping import Clipping
from shoal.lanes.dense_gradients import check_layers
from shoal.lanes.rng import LaneRng
from shoal.lanes.sparse.embedding import sparse_tables
from shoal.sharding.build_model import shard_model
from shoal.sharding.deferred_init import DeferredInit
from shoal.sharding.device_mesh import ShardMesh
from shoal.sharding.local_state import LocalState
from shoal.sharding.memory_limits import release_freed_memory
from shoal.sharding.optimizer_factory import OptimizerFactory
from shoal.sharding.pipeline_parallel import PipelineParallelModel
from shoal.sharding.replica import ShardedReplica
from shoal.sharding.sharded_model import ShardedModel
from shoal.spec import seeds
from shoal.spec.job import InitFromConfig, Job
from shoal.spec.sharding import NoShardingConfig, PipelineParallelConfig
from shoal.tasks.initial_weights import WeightMatch, match_weights
from shoal.tasks.lazy_parameters import refuse_lazy_parameters
from shoal.tasks.model import (
    build_lr_schedule,
    build_model,
    build_plain_task,
    build_task,
    set_trainable,
)
from shoal.tasks.optimizer import check_task, make_optimizer
from shoal.tasks.task import Task
from shoal.tasks.user_errors import wrap_user_errors

ShardLayout = Mapping[str, Any]
"""`shard`, `ways` and `cuts`, as in a checkpoint."""
AsLinkErrors = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class ShardedReplicaBuilder:
    """Builds shards of the job's model."""

    job: Job
    task: Task
    example: Batch
    steps: int
    steps_per_epoch: int
    rng_state: Tensor | None = None
    """torch's RNG state after the task was made, if the task is the user's."""
    rng: LaneRng = field(default_factory=lambda: LaneRng(torch.device("cpu")))
    used_models: WeakSet[nn.Module] = field(default_factory=WeakSet)
    """Models that have already been sharded."""

    def build(self, mesh: ShardMesh, layout: ShardLayout | None, as_link_errors: AsLinkErrors) -> ShardedReplica:
        """Build the replica with the job's initial weights. If `layout` has the job's kind and number of shards, the
        model is split as there. Members communicate here: `as_link_errors` turns the loss of one into a LinkError."""
        job, task = self.job, self.task
        check_task(job, task)
        self.rng.seed_all(job.seed, seeds.MODEL)
        if self.rng_state is not None:
            torch.set_rng_state(self.rng_state)
        release_freed_memory()
        with wrap_user_errors("SH204", "making the model"):
            deferred_init = DeferredInit(self._make_model)
        if sparse_tables(deferred_init.model):
            raise error("SH418", "the model has sparse tables, and the job has a shard", where="shard")
        check_layers(deferred_init.model)
        refuse_lazy_parameters(deferred_init.model)
        with wrap_user_errors("SH413", "making the optimizer"):
            optimizer_factory = OptimizerFactory(make_optimizer(job, task, deferred_init.model), deferred_init.model)
        with wrap_user_errors("SH401", "the first batch"), as_link_errors():
            sharded_model = shard_model(
                self._sharding_config(layout), deferred_init.model, mesh, loss=task.loss, example=self.example
            )
        local_state = LocalState.of(sharded_model)
        local_state.initialise(deferred_init)
        optimizer = optimizer_factory.rebind(local_state.param_module)
        epochs = -(-self.steps // self.steps_per_epoch)
        replica = ShardedReplica(
            sharded_model,
            local_state,
            optimizer,
            task.loss,
            seed=job.seed,
            schedule=build_lr_schedule(job.schedule, optimizer, steps=self.steps, epochs=epochs, base_dir=job.base_dir),
            schedule_every=self.steps_per_epoch if job.schedule and job.schedule.every == "epoch" else 1,
            clipping=Clipping(job.clip.norm, job.clip.value) if job.clip else None,
            autocast=torch.bfloat16 if job.precision == "bf16" else None,
            rng=self.rng,
        )
        replica.why_not_deferred, replica.optimizer_factory = deferred_init.why_not_deferred, optimizer_factory
        with wrap_user_errors("SH401", "the first batch"), as_link_errors():
            replica.probe(self.example)
        return replica

    def _make_model(self) -> nn.Module:
        before = list(vars(self.task).values())
        model = build_model(self.job) if self.job.task is None else self.task.model()
        if model in self.used_models or any(model is one for one in before):
            message = "the model is the same object each time, and its parts are made anew whenever workers come or go"
            where, made = ("task", "`model()`") if self.job.task else ("model", "the function")
            raise error("SH204", message, where=where, fix=f"Let {made} make a model whenever it is called.")
        self.used_models.add(model)
        if self.job.init_from is not None:
            set_trainable(model, self.job.init_from)
        return model

    def _sharding_config(self, layout: ShardLayout | None) -> Any:
        shard = self.job.shard
        if isinstance(shard, PipelineParallelConfig) and layout and self.matches(layout) and layout["cuts"]:
            return shard.model_copy(update={"cuts": list(layout["cuts"])})
        return shard

    def matches(self, layout: ShardLayout) -> bool:
        return (layout["shard"], layout["ways"]) == (self.job.shard.kind, self.job.workers_per_replica)

    def layout_of(self, sharded_model: ShardedModel) -> dict[str, Any]:
        cuts = sharded_model.split_points if isinstance(sharded_model, PipelineParallelModel) else []
        return {"shard": self.job.shard.kind, "ways": self.job.workers_per_replica, "cuts": cuts}

    def load_initial_weights(self, replica: ShardedReplica) -> dict[str, Any]:
        """Load the weights that the job starts from, tensor by tensor. Returns the fields of `weights_loaded`."""
        init = self.job.init_from
        if init is None or init.path is None:
            return {}
        path = init.path if "://" in init.path else str(Path(self.job.base_dir) / init.path)
        found = load_initial_shards(replica.local_state, replica.state_dict_names(), open_weights(path), init)
        return found.event_fields(init.path)


def make_replica_builder(job: Job, example: Batch, *, steps: int, steps_per_epoch: int) -> ShardedReplicaBuilder:
    rng_state = None
    if job.task is None:
        task = build_plain_task(job, nn.Module())
    else:
        LaneRng(torch.device("cpu")).seed_all(job.seed, seeds.MODEL)
        task = build_task(job)
        rng_state = torch.get_rng_state()
    return ShardedReplicaBuilder(job, task, example, steps, steps_per_epoch, rng_state)


def unsharded_job(job: Job) -> Job:
    """The same job without shards, for a single process that inspects it."""
    return job.model_copy(update={"shard": NoShardingConfig()})


@torch.no_grad()
def load_initial_shards(
    local_state: LocalState, names: Mapping[str, str], weights: Mapping[str, Tensor], init: InitFromConfig
) -> WeightMatch:
    """Load the tensors that fit the model, by the rules of `init_from`. SH406 if one that must fit does not."""
    own = local_state.model.state_dict(keep_vars=True)

    def place(name: str, values: Tensor) -> None:
        if part := local_state.shards.get(names[name]):
            part.local_tensor.copy_(part.tensor_slice.view_of(values))

    return match_weights({name: own[name].shape for name in names}, names, weights, init, place=place)
