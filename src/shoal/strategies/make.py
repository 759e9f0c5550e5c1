"""Makes the strategy that trains a job. Only this module looks at the kind of sync or shard that a job has."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from shoal.collectives.group import ViewGroup
from shoal.collectives.torch_group import has_nccl
from shoal.data.batch import Batch
from shoal.errors import error
from shoal.lanes.carry import LaneCarry
from shoal.lanes.clipping import Clipping
from shoal.lanes.dense_gradients import check_layers
from shoal.lanes.gradient_checkpointing import checkpoint_modules
from shoal.lanes.loss_scale import LossScale
from shoal.lanes.passes import ClosureReplica, MultiPassReplica, PhasedReplica, needs_closure
from shoal.lanes.replica import Replica
from shoal.lanes.rng import LaneRng
from shoal.lanes.weight_average import WeightAverage
from shoal.paramserver.push_buffers import PushCodec
from shoal.sharding.build_replica import ShardedReplicaBuilder, make_replica_builder
from shoal.spec import seeds
from shoal.spec.job import DdpSyncConfig, Job, LanesSyncConfig, LocalSgdSyncConfig, ServerSyncConfig
from shoal.spec.run_paths import cache_directory
from shoal.spec.sharding import NoShardingConfig
from shoal.strategies.base import GradientSync, Strategy
from shoal.strategies.context import StepContext
from shoal.strategies.device_sync import DeviceAllReduceSync
from shoal.strategies.encoded_sync import EncodedAllReduceSync
from shoal.strategies.fault_injection import FaultInjection
from shoal.strategies.local_sgd.fragments import (
    FragmentChannels,
    MakeFragmentAllReduce,
    encoded_fragments,
    plain_fragments,
)
from shoal.strategies.local_sgd.outer_optimizer import OuterOptimizer
from shoal.strategies.local_sgd.replica import LocalReplica
from shoal.strategies.local_sgd.schedule import SyncSchedule
from shoal.strategies.local_sgd.strategy import LocalSgdStrategy
from shoal.strategies.ordered_sync import OrderedAllReduceSync, OrderedSync
from shoal.strategies.parameter_server import ParameterServerStrategy
from shoal.strategies.parameter_server_sync import ParameterServerSync
from shoal.strategies.passes import MultiPassStrategy
from shoal.strategies.replicated import ReplicatedStrategy
from shoal.strategies.self_check.recompute import Rebuild
from shoal.strategies.self_check.strategy import CheckedJob, SelfCheck
from shoal.strategies.sharded import ShardedStrategy
from shoal.strategies.sharded_commit import ShardedSync
from shoal.strategies.torch_ddp import TorchDdpSync
from shoal.tasks.compilation import compile_model, one_at_a_time
from shoal.tasks.lazy_parameters import initialise_lazy_parameters
from shoal.tasks.loss_calls import ExplainedLoss, look_at_loss_calls
from shoal.tasks.model import build_lr_schedule, build_task, load_initial_weights
from shoal.tasks.optimizer import check_task, make_optimizer, make_optimizers
from shoal.tasks.task import Task
from shoal.tasks.user_errors import wrap_user_errors

Report = Callable[..., object]
AUTOCAST = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype of forward passes."""


class JobModel(Protocol):
    """A job's model before the run: whole, or still to be sharded. Makes the strategy that trains it."""

    @property
    def task(self) -> Task: ...

    @property
    def parameter_counts(self) -> Mapping[str, int]:
        """The numbers of parameters and of trainable ones; empty if they are unknown before the first view."""

    def make_strategy(self, context: StepContext) -> Strategy: ...


def wanted_device(job: Job) -> str:
    """The device that the job asks for. Sharded models are held on the CPU."""
    return job.device if isinstance(job.shard, NoShardingConfig) else "cpu"


def build_model(
    job: Job, example: Batch, device: torch.device, *, steps: int, steps_per_epoch: int, report: Report
) -> JobModel:
    """The job's model at step 0 of a run of `steps` steps."""
    if not isinstance(job.shard, NoShardingConfig):
        return ShardedJobModel(make_replica_builder(job, example, steps=steps, steps_per_epoch=steps_per_epoch))
    length = {"steps": steps, "steps_per_epoch": steps_per_epoch}
    example = example.to(device)
    task, replica = build_replica(job, device, example=example, report=report, **length)
    _check_tables(job, replica)
    with wrap_user_errors("SH401", "the first batch"), one_at_a_time(cache_directory(), job.compile):
        replica.probe(example)
        with replica.rehearsal():
            notes = [task.look_at(replica.model, example)]
            if not task.explains_itself and not job.compile:
                notes += look_at_loss_calls(task, replica.model, example)
        if job.compile:
            replica.begin_step()
            replica.forward_backward(0, 0, example, share=1.0)
            replica.undo_step()
    for note in filter(None, notes):
        report("note", message=note)
    rebuild = partial(build_replica, job, device, example=example, report=_report_nothing, **length)
    return WholeJobModel(job, task, replica, steps, rebuild)


def sync_schedule_of(job: Job) -> SyncSchedule:
    """When lanes sync: after every step, unless the job uses local SGD."""
    return (
        SyncSchedule(job.sync.every, job.sync.rounds_per_sync)
        if isinstance(job.sync, LocalSgdSyncConfig)
        else SyncSchedule()
    )


# ---- whole models ----


@dataclass(frozen=True)
class WholeJobModel:
    job: Job
    task: Task
    replica: Replica
    steps: int
    rebuild: Rebuild

    @property
    def parameter_counts(self) -> Mapping[str, int]:
        every = list(self.replica.model.parameters())
        return {
            "parameters": sum(p.numel() for p in every),
            "trainable": sum(p.numel() for p in every if p.requires_grad),
        }

    def make_strategy(self, context: StepContext) -> Strategy:
        context.peers.residuals.step_after = partial(sync_schedule_of(self.job).next_sync, steps=self.steps)
        group = _group_of(context)
        return with_faults(self.job, context, self._with_check(context, group, self._make_strategy(context, group)))

    def _with_check(self, context: StepContext, group: ViewGroup, strategy: Strategy) -> Strategy:
        """Check the lanes of a job that promises the same bits, unless their rows are on servers."""
        job, kind = self.job, self.job.sync.kind
        if job.inexact_reason or not job.self_check:
            return strategy
        if self.replica.tables:
            context.report("self_checked", lanes=0, failure="the rows of sparse tables are on servers")
            return strategy
        checked = CheckedJob(
            self.replica,
            group,
            self.rebuild,
            steps=self.steps,
            share=job.self_check,
            lane_share=_whole_share if kind == "local" else operator.truediv,
            next_commit=partial(sync_schedule_of(job).next_sync, steps=self.steps),
            updates_here=kind == "lanes",
            evaluates_alone=kind != "server",
        )
        return SelfCheck(strategy, context, checked)

    def _make_strategy(self, context: StepContext, group: ViewGroup) -> Strategy:
        job = self.job
        if isinstance(job.sync, ServerSyncConfig):
            server_sync = _server_sync(job, job.sync, self.replica, group, context)
            return ParameterServerStrategy(context, self.replica, group=group, server_sync=server_sync)
        if isinstance(job.sync, LocalSgdSyncConfig):
            return self._local_sgd(job.sync, group, context)
        if isinstance(job.sync, DdpSyncConfig):
            on_total = context.peers.state_publisher.publish_total
            sync: GradientSync = TorchDdpSync(
                job.lane_count, group, backend=job.sync.backend, device=self.replica.device, on_total=on_total
            )
        elif isinstance(self.replica, MultiPassReplica):
            ordered = self._plain_sync(group, context)
            return MultiPassStrategy(context, self.replica, group=group, sync=ordered)
        else:
            sync, _ = self._lanes_sync(group, context)
        return ReplicatedStrategy(context, self.replica, group=group, sync=sync)

    def _lanes_sync(self, group: ViewGroup, context: StepContext) -> tuple[GradientSync, MakeFragmentAllReduce]:
        """The sync with the job's codec, if any; and a maker of the same all-reduce for fragments."""
        lanes, replica, codec, peers = self.job.lane_count, self.replica, _codec_of(self.job), context.peers
        on_total = peers.state_publisher.publish_total
        if codec is None:
            fragments = plain_fragments(group, lanes=lanes, device=replica.device)
            return self._plain_sync(group, context), fragments
        sync = EncodedAllReduceSync(
            lanes, group, settings=codec, replica=replica, peers=peers, report=context.report, on_total=on_total
        )
        return sync, encoded_fragments(
            group,
            settings=codec,
            layout=lambda: sync.encoded_layout,
            residuals=peers.residuals,
            device=replica.device,
        )

    def _plain_sync(self, group: ViewGroup, context: StepContext) -> OrderedSync:
        """Lane sums are sent unchanged: through host memory, or on the device."""
        on_total, lanes = context.peers.state_publisher.publish_total, self.job.lane_count
        wanted = self.job.sync.exchange if isinstance(self.job.sync, LanesSyncConfig) else "host"
        device = self.replica.device
        if wanted == "device" or (wanted == "auto" and device.type == "cuda" and has_nccl()):
            return DeviceAllReduceSync(lanes, group, device=device, on_total=on_total)
        return OrderedAllReduceSync(lanes, group, on_total=on_total)

    def _local_sgd(self, config: LocalSgdSyncConfig, group: ViewGroup, context: StepContext) -> Strategy:
        schedule = sync_schedule_of(self.job)
        local = LocalReplica(
            self.replica,
            outer=outer_optimizer_for(config),
            next_sync=partial(schedule.next_sync, steps=self.steps),
        )
        sync, fragment_allreduce = self._lanes_sync(group, context)
        return LocalSgdStrategy(
            context,
            local,
            group=group,
            sync=sync,
            schedule=schedule,
            fragments=config.fragments,
            channels=FragmentChannels(local, fragment_allreduce),
        )


def build_replica(
    job: Job, device: torch.device, *, example: Batch | None, steps: int, steps_per_epoch: int, report: Report
) -> tuple[Task, Replica]:
    """The task, and the whole replica at step 0: a pure function of the job and of its first batch, `example`, from
    which lazy modules get their shapes."""
    rng = LaneRng(device)
    rng.seed_all(job.seed, seeds.MODEL)
    task = build_task(job)
    check_task(job, task)
    if task.carries:
        task.carry = {}
    with wrap_user_errors("SH204", "making the model"):
        model = task.to(device)
    if example is not None:
        initialise_lazy_parameters(task, model, example)
    if job.init_from is not None:
        facts = load_initial_weights(model, job.init_from, base_dir=job.base_dir)
        if facts:
            report("weights_loaded", **facts)
    check_layers(model)
    checkpoint_modules(model, job.gradient_checkpointing)
    if job.compile:
        compile_model(model, cache_directory())
    epochs = -(-steps // steps_per_epoch)
    schedule_of = partial(build_lr_schedule, job.schedule, steps=steps, epochs=epochs, base_dir=job.base_dir)
    replica = _make_replica(job, task, model, schedule_of, steps_per_epoch=steps_per_epoch, rng=rng)
    replica.saves_frozen = job.checkpoint.frozen
    replica.loss_scale = LossScale() if job.precision == "fp16" else None
    if job.average is not None:
        replica.average = WeightAverage(model, **job.average.model_dump())
    if task.carries:
        replica.carry = LaneCarry(task, steps_per_epoch=steps_per_epoch, device=device)
    return task, replica


def _make_replica(
    job: Job, task: Task, model: nn.Module, schedule_of: Callable[..., Any], *, steps_per_epoch: int, rng: LaneRng
) -> Replica:
    """One update per step, or a step in several passes."""
    settings: dict[str, Any] = {
        "seed": job.seed,
        "schedule_every": steps_per_epoch if job.schedule and job.schedule.every == "epoch" else 1,
        "clipping": Clipping(job.clip.norm, job.clip.value) if job.clip else None,
        "autocast": AUTOCAST[job.precision],
        "rng": rng,
    }
    explained = ExplainedLoss(task)
    loss = task.loss if task.explains_itself else explained.loss
    if task.has_phases:
        optimizers = make_optimizers(job, task, model)
        schedules = {name: schedule_of(one) for name, one in optimizers.items()} if job.schedule else {}
        first, schedule = next(iter(optimizers.values())), next(iter(schedules.values()), None)
        phased = PhasedReplica(model, first, loss, schedule=schedule, **settings)
        if phased.schedule_needs_metric:
            message = "a schedule that needs a metric does not know which optimizer to change"
            raise error("SH861", message, where="schedule", fix="Use a schedule without one in a task with phases.")
        return phased.bind(explained.step, optimizers, schedules)
    optimizer = make_optimizer(job, task, model)
    schedule = schedule_of(optimizer)
    if not needs_closure(optimizer):
        return Replica(model, optimizer, loss, schedule=schedule, **settings)
    if task.carries:
        message = f"{type(optimizer).__name__} computes a lane several times, and the task carries something on"
        raise error("SH863", message, where="optimizer", fix="Use an optimizer without a closure, such as Adam.")
    return ClosureReplica(model, optimizer, loss, schedule=schedule, **settings)


def _check_tables(job: Job, replica: Replica) -> None:
    """Raise an error if the job cannot train sparse tables: they live on servers, and are not encoded."""
    if replica.tables and job.sync.kind not in ("server", "auto"):
        raise error("SH418", f"the model has sparse tables, and the job has `sync: {job.sync.kind}`", where="sync")
    if replica.tables and job.codec.kind != "none":
        fix = "Leave `codec` out: only touched rows travel in any case."
        raise error("SH110", "the model has sparse tables, and the job has a codec", where="codec", fix=fix)


def outer_optimizer_for(sync: LocalSgdSyncConfig) -> Callable[[Sequence[torch.Tensor]], OuterOptimizer]:
    if sync.outer == "average":
        return OuterOptimizer
    return partial(OuterOptimizer, lr=sync.lr, momentum=sync.momentum)


def _server_sync(
    job: Job, config: ServerSyncConfig, replica: Replica, group: ViewGroup, context: StepContext
) -> ParameterServerSync:
    codec, staleness = _codec_of(job), config.staleness_bound
    push_codec = None
    if codec:
        push_codec = PushCodec(
            replica,
            codec,
            context.peers,
            context.report,
            synchronous=staleness == 0,
            cut_tensors=not job.clips_by_norm,
        )
    return ParameterServerSync(
        job.lane_count, replica, group=group, token=context.peers.token, staleness=staleness, push_codec=push_codec
    )


def _whole_share(size: int, total: int) -> float:
    """The weight of a lane that trains by itself."""
    return 1.0


def _report_nothing(kind: str, /, **fields: object) -> None:
    """The first build has reported everything."""


def _codec_of(job: Job) -> dict[str, Any] | None:
    return job.codec.model_dump() if job.codec.kind != "none" else None


# ---- sharded models ----


@dataclass(frozen=True)
class ShardedJobModel:
    builder: ShardedReplicaBuilder

    @property
    def task(self) -> Task:
        return self.builder.task

    @property
    def parameter_counts(self) -> Mapping[str, int]:
        return {}

    def make_strategy(self, context: StepContext) -> Strategy:
        job, group = self.builder.job, _group_of(context)
        sync = ShardedSync(job.workers_per_replica, group)
        return with_faults(job, context, ShardedStrategy(context, self.builder, group=group, sync=sync))


# ---- both ----


def _group_of(context: StepContext) -> ViewGroup:
    return ViewGroup(context.peers.endpoint, context.peers.token)


def with_faults(job: Job, context: StepContext, strategy: Strategy) -> Strategy:
    if job.faults.pause_probability <= 0:
        return strategy
    return FaultInjection(strategy, context, pause_probability=job.faults.pause_probability, pause_s=job.faults.pause_s)
