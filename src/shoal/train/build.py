"""From a job and a run's directory to everything the loop uses. The order of construction is the order of reading."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.store import CheckpointStore
from shoal.collectives.peer_services import PeerServices
from shoal.data.batch import Batch
from shoal.data.batch_loader import BatchLoader
from shoal.data.datasets import Datasets, open_datasets
from shoal.data.make_sampler import make_sampler
from shoal.data.samplers import LaneSampler
from shoal.errors import error
from shoal.events import EventWriter
from shoal.fleet.membership import Membership
from shoal.lanes.replica import Clipping, Replica
from shoal.lanes.rng import LaneRng
from shoal.paramserver.push_buffers import PushCodec
from shoal.sharding.build_replica import ShardedReplicaBuilder, make_replica_builder
from shoal.spec import seeds
from shoal.spec.data import BalancedSamplerConfig, SamplerConfig
from shoal.spec.job import Job, LocalSgdSyncConfig
from shoal.spec.names import expand_alias
from shoal.spec.resolve import import_ref
from shoal.spec.run_paths import RunPaths
from shoal.spec.sharding import NoShardingConfig
from shoal.strategies.base import GradientSync
from shoal.strategies.local_sgd.outer_optimizer import OuterOptimizer
from shoal.strategies.local_sgd.replica import LocalReplica
from shoal.strategies.local_sgd.schedule import SyncSchedule
from shoal.strategies.parameter_server import ParameterServerSync
from shoal.strategies.replicated import OrderedAllReduceSync
from shoal.strategies.replicated_encoded import EncodedAllReduceSync
from shoal.strategies.sharded_commit import ShardedSync
from shoal.strategies.torch_ddp import TorchDdpSync
from shoal.tasks.evaluation import Evaluator
from shoal.tasks.model import build_lr_schedule, build_optimizer, build_task, load_initial_weights
from shoal.tasks.task import Task
from shoal.tasks.user_errors import wrap_user_errors
from shoal.train.activity import Activity
from shoal.train.devices import pick_device
from shoal.train.loop import Loop, TrainSchedule
from shoal.train.reporting import Reporter, StepStats
from shoal.train.trace import StateTrace
from shoal.train.watchers import BestMetric, EarlyStopping


@dataclass(frozen=True)
class BuiltJob:
    """What a job becomes before it is run."""

    job: Job
    task: Task
    data: Datasets
    sampler: LaneSampler
    replica: Replica
    evaluator: Evaluator
    train_schedule: TrainSchedule
    example: Batch
    replica_builder: ShardedReplicaBuilder | None = None
    """Where the model is spread over workers: then the replica has nothing in it before there is a view."""


def build(
    job: Job,
    *,
    cache_dir: Path,
    report: Callable[..., object],
    choose_device: Callable[[str], torch.device] = pick_device,
) -> BuiltJob:
    """Data, model, optimizer, and a first look at a batch. Tells `built` with the facts."""
    device = choose_device(job.device if isinstance(job.shard, NoShardingConfig) else "cpu")
    data = open_datasets(
        job.data,
        seed=job.seed,
        base_dir=job.base_dir,
        cache_dir=cache_dir,
        notify=lambda message: report("note", message=message),
    )
    sampler = make_sampler(
        _sampler_config(job),
        ids=data.train.ids,
        lanes=job.lane_count,
        batch_size=job.batch_size,
        seed=job.seed,
        drop_last=job.drop_last,
        source=data.train.source,
    )
    steps = job.steps or (job.epochs or 1) * sampler.steps_per_epoch
    example = _example(data, sampler)
    replica_builder = None
    if isinstance(job.shard, NoShardingConfig):
        task, replica = build_replica(job, device, steps=steps, steps_per_epoch=sampler.steps_per_epoch, report=report)
    else:
        replica_builder = make_replica_builder(job, example, steps=steps, steps_per_epoch=sampler.steps_per_epoch)
        task, replica = replica_builder.task, replica_builder.placeholder
    if replica.tables and job.sync.kind not in ("server", "auto"):
        raise error("SH418", f"the model has sparse tables, and the job has `sync: {job.sync.kind}`", where="sync")
    if replica.tables and job.codec.kind != "none":
        fix = "Leave `codec` out: only touched rows travel in any case."
        raise error("SH110", "the model has sparse tables, and the job has a codec", where="codec", fix=fix)
    if replica_builder is None:
        with wrap_user_errors("SH401", "the first batch"):
            replica.probe(example.to(device))
    train_schedule = TrainSchedule(
        steps,
        _evaluation_interval(job, sampler.steps_per_epoch),
        job.lane_count,
        sync_schedule=sync_schedule_of(job),
        fragments=job.sync.fragments if isinstance(job.sync, LocalSgdSyncConfig) else 1,
        keep_best=job.checkpoint.keep_best > 0,
        pause_probability=job.faults.pause_probability,
        pause_s=job.faults.pause_s,
    )
    if "validation" in data.held_out and train_schedule.sync_schedule.steps_per_sync > min(
        train_schedule.evaluate_every, steps
    ):
        message = (
            f"lanes agree every {train_schedule.sync_schedule.steps_per_sync} steps (sync.every times sync.settle): "
            f"the validation part, due every {train_schedule.evaluate_every}, is measured then and at the end"
        )
        report("note", message=message)
    chunk = job.evaluate.batch_size or job.batch_size
    evaluator = Evaluator(task, lanes=job.lane_count, chunk_size=chunk, seed=job.seed, loader=job.data.loader)
    report(
        "built",
        steps=steps,
        steps_per_epoch=sampler.steps_per_epoch,
        lanes=job.lane_count,
        samples=data.sizes,
        skipped=data.skipped_rows,
        device=str(device),
        **({} if replica_builder else parameter_counts(replica.model)),
    )
    return BuiltJob(job, task, data, sampler, replica, evaluator, train_schedule, example, replica_builder)


def build_replica(
    job: Job, device: torch.device, *, steps: int, steps_per_epoch: int, report: Callable[..., object]
) -> tuple[Task, Replica]:
    """The weights at step 0: a pure function of the job."""
    rng = LaneRng(device)
    rng.seed_all(job.seed, seeds.MODEL)
    task = build_task(job)
    with wrap_user_errors("SH204", "making the model"):
        model = task.to(device)
    if job.init_from is not None:
        facts = load_initial_weights(model, job.init_from, base_dir=job.base_dir)
        if facts:
            report("note", message=f"weights from {job.init_from.path}: {facts['loaded']} tensors", **facts)
    optimizer = task.optimizer(model) or build_optimizer(job.optimizer, model, base_dir=job.base_dir)
    epochs = -(-steps // steps_per_epoch)
    schedule = build_lr_schedule(job.schedule, optimizer, steps=steps, epochs=epochs, base_dir=job.base_dir)
    replica_class: type[Replica] = Replica
    local: dict[str, Any] = {}
    if isinstance(job.sync, LocalSgdSyncConfig):
        replica_class, local = (
            LocalReplica,
            {
                "outer": outer_optimizer_for(job.sync),
                "next_sync": partial(sync_schedule_of(job).next_sync, steps=steps),
            },
        )
    replica = replica_class(
        model,
        optimizer,
        task.loss,
        seed=job.seed,
        schedule=schedule,
        schedule_every=steps_per_epoch if job.schedule and job.schedule.every == "epoch" else 1,
        clipping=Clipping(job.clip.norm, job.clip.value) if job.clip else None,
        autocast=torch.bfloat16 if job.precision == "bf16" else None,
        rng=rng,
        **local,
    )
    return task, replica


def parameter_counts(model: torch.nn.Module) -> dict[str, int]:
    """How many numbers it has, and how many of them may change."""
    every = list(model.parameters())
    return {
        "parameters": sum(p.numel() for p in every),
        "trainable": sum(p.numel() for p in every if p.requires_grad),
    }


def sync_schedule_of(job: Job) -> SyncSchedule:
    """When lanes agree: after every step, if they do not train by themselves."""
    return SyncSchedule(job.sync.every, job.sync.settle) if isinstance(job.sync, LocalSgdSyncConfig) else SyncSchedule()


def outer_optimizer_for(sync: LocalSgdSyncConfig) -> Callable[[Sequence[torch.Tensor]], OuterOptimizer]:
    if sync.outer == "average":
        return OuterOptimizer
    return partial(OuterOptimizer, lr=sync.lr, momentum=sync.momentum)


def _sampler_config(job: Job) -> SamplerConfig:
    """The dealing, with a file of costs found from the job's directory."""
    deal = job.data.deal
    if isinstance(deal, BalancedSamplerConfig) and deal.by.endswith(".npy"):
        return deal.model_copy(update={"by": str(Path(job.base_dir) / deal.by)})
    return deal


def _example(data: Datasets, sampler: LaneSampler) -> Batch:
    """The first lane's first samples, as the model will get them."""
    batch = data.train.source.take(sampler.ids(0, 0))
    return data.train.transform(batch) if data.train.transform else batch


def _evaluation_interval(job: Job, steps_per_epoch: int) -> int:
    return job.evaluate.every_steps or (job.evaluate.every_epochs or 1) * steps_per_epoch


def build_loop(
    built: BuiltJob,
    paths: RunPaths,
    *,
    membership: Membership,
    peers: PeerServices,
    stream: EventWriter,
    activity: Activity,
    has_state: bool,
    on_finish: Callable[[Loop, str], None],
    leave_reason: Callable[[], str],
    trace: bool = False,
) -> Loop:
    """The loop of a worker, with everything that talks to the outside."""
    job = built.job
    best = BestMetric(job.best)
    user_watchers = [_make_watcher(name, paths, job) for name in job.watch]
    if trace and built.replica_builder is None:
        user_watchers.append(StateTrace(paths.trace, built.replica))
    watchers = [best, *([EarlyStopping(job.stop_early)] if job.stop_early else []), *user_watchers]
    reporter = Reporter(stream, watchers)
    stats = StepStats(reporter, every_step=bool(user_watchers))
    store = open_store(job, paths, report=reporter.report)
    peers.residuals.step_after = built.train_schedule.next_commit
    sync = make_sync(job, built.replica, peers, reporter.report)
    activity.moved_bytes = sync.moved_bytes
    return Loop(
        built.train_schedule,
        replica=built.replica,
        sampler=built.sampler,
        batches=make_batch_loader(built),
        sync=sync,
        peers=peers,
        store=store,
        membership=membership,
        reporter=reporter,
        stats=stats,
        activity=activity,
        evaluator=built.evaluator,
        splits=built.data.held_out,
        task=built.task,
        best=best,
        has_state=has_state,
        on_finish=on_finish,
        leave_reason=leave_reason,
        replica_builder=built.replica_builder,
    )


def make_batch_loader(built: BuiltJob) -> BatchLoader:
    job = built.job
    return BatchLoader(
        built.data.train.source,
        built.sampler,
        seed=job.seed,
        lanes=job.lane_count,
        augment=built.data.augment,
        transform=built.data.train.transform,
        loader=job.data.loader,
    )


def make_sync(job: Job, replica: Replica, peers: PeerServices, report: Callable[..., object]) -> GradientSync:
    transport: dict[str, Any] = {"endpoint": peers.endpoint, "token": peers.token}
    if not isinstance(job.shard, NoShardingConfig):
        return ShardedSync(job.workers_per_replica, **transport)
    if job.sync.kind == "ddp":
        return TorchDdpSync(job.lane_count, job.sync.backend, replica.device, **transport)
    codec = job.codec.model_dump() if job.codec.kind != "none" else None
    if job.sync.kind == "server":
        coding = PushCodec(replica, codec, peers, report, synchronous=job.sync.staleness_bound == 0) if codec else None
        return ParameterServerSync(
            job.lane_count, replica, staleness=job.sync.staleness_bound, push_codec=coding, **transport
        )
    if codec:
        return EncodedAllReduceSync(job.lane_count, codec, replica, peers=peers, report=report)
    return OrderedAllReduceSync(job.lane_count, **transport)


def open_store(job: Job, paths: RunPaths, *, report: Callable[..., object]) -> CheckpointStore:
    return CheckpointStore(
        paths.store(job.checkpoint.path),
        job_sha256=job.resume_compatibility_sha256(),
        every=job.checkpoint.interval,
        keep=job.checkpoint.keep,
        keep_best=job.checkpoint.keep_best,
        metric_sign=job.best.sign,
        emit=report,
        name=paths.checkpoint_namespace,
    )


def _make_watcher(ref: Any, paths: RunPaths, job: Job) -> Any:
    kind = import_ref(expand_alias(ref, field="watch"), base_dir=job.base_dir)
    if not callable(kind):
        return kind
    args = dict(ref.args)
    if "directory" in inspect.signature(kind).parameters:
        args.setdefault("directory", str(paths.root / "tensorboard"))
    with wrap_user_errors("SH208", f"watch {ref.name}"):
        made = kind(**args)
    if not hasattr(made, "watch"):
        raise error("SH206", f"'{ref.name}' has no method watch(event)", where="watch")
    return made
