"""Builds everything that the loop uses from a job and a run's directory."""

from __future__ import annotations

import inspect
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.example_inputs import describe_example
from shoal.checkpoint.export import write_error
from shoal.checkpoint.model_code import CODE, pack_code
from shoal.checkpoint.store import CheckpointStore
from shoal.collectives.peer_services import PeerServices
from shoal.data.batch import Batch
from shoal.data.batch_loader import BatchLoader
from shoal.data.datasets import Datasets, open_datasets
from shoal.data.fitted import Fitted
from shoal.data.prefetch import Report, no_report
from shoal.data.samplers import LaneSampler, make_sampler
from shoal.errors import error, plural
from shoal.events import EventWriter
from shoal.fleet.membership import Membership
from shoal.lanes.replica import Replica
from shoal.spec.data import BalancedSamplerConfig, SamplerConfig, WeightedSamplerConfig
from shoal.spec.job import Job
from shoal.spec.names import WATCH_ALIASES, expand_alias
from shoal.spec.resolve import import_ref
from shoal.spec.run_paths import RunPaths
from shoal.strategies.base import FinalModel
from shoal.strategies.context import PlaceChunks, StepContext
from shoal.strategies.make import JobModel, WholeJobModel, build_model, sync_schedule_of, wanted_device
from shoal.tasks.evaluation import Evaluator
from shoal.tasks.task import Task
from shoal.tasks.user_errors import wrap_user_errors
from shoal.train.activity import Activity
from shoal.train.devices import pick_device
from shoal.train.loop import Loop, TrainSchedule
from shoal.train.progress import Progress
from shoal.train.reporting import Reporter, StepStats
from shoal.train.run_output import DirectoryOutput, RunOutput
from shoal.train.trace import StateTrace
from shoal.train.watched import AttachedWorker, WatchedBatches, WatchLocally
from shoal.train.watchers import BestMetric, EarlyStopping


@dataclass(frozen=True)
class BuiltJob:
    """A job with its data, model, evaluator and schedule, ready to run."""

    job: Job
    data: Datasets
    sampler: LaneSampler
    example: Batch
    model: JobModel
    evaluator: Evaluator
    train_schedule: TrainSchedule

    @property
    def task(self) -> Task:
        return self.model.task

    @property
    def replica(self) -> Replica:
        """The whole replica, for probes: they never shard a job."""
        assert isinstance(self.model, WholeJobModel)
        return self.model.replica


@dataclass(frozen=True)
class TrainingSession:
    """What connects this worker's training to its driver and to the other workers."""

    membership: Membership
    peers: PeerServices
    activity: Activity
    place_chunks: PlaceChunks
    leave_reason: Callable[[], str]


def build(
    job: Job,
    *,
    cache_dir: Path,
    report: Callable[..., object],
    choose_device: Callable[[str], torch.device] = pick_device,
) -> BuiltJob:
    """Open the data, build model and optimizer, and take one example batch. Reports `built` with their sizes."""
    device = choose_device(wanted_device(job))
    data, sampler = open_training_data(job, cache_dir=cache_dir, report=report)
    schedule = schedule_of(job, sampler.steps_per_epoch)
    _check_average_begins(job, schedule.steps)
    steps, example = schedule.steps, example_batch(data, sampler)
    model = build_model(job, example, device, steps=steps, steps_per_epoch=sampler.steps_per_epoch, report=report)
    _note_late_evaluations(schedule, data, report)
    chunk = job.evaluate.batch_size or job.batch_size
    evaluator = Evaluator(
        model.task, lanes=job.lane_count, chunk_size=chunk, seed=job.seed, loader=job.data.loader, report=report
    )
    report(
        "built",
        steps=steps,
        steps_per_epoch=sampler.steps_per_epoch,
        lanes=job.lane_count,
        samples=data.sizes,
        skipped=data.skipped_rows,
        device=str(device),
        **model.parameter_counts,
    )
    return BuiltJob(job, data, sampler, example, model, evaluator, schedule)


def open_training_data(job: Job, *, cache_dir: Path, report: Callable[..., object]) -> tuple[Datasets, LaneSampler]:
    """The data of a job, and the sampler that deals its training samples to lanes."""
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
    return data, sampler


def schedule_of(job: Job, steps_per_epoch: int) -> TrainSchedule:
    return TrainSchedule(
        job.steps or (job.epochs or 1) * steps_per_epoch,
        _evaluation_interval(job, steps_per_epoch),
        sync_schedule=sync_schedule_of(job),
        keep_best=job.checkpoint.keep_best > 0,
    )


def _check_average_begins(job: Job, steps: int) -> None:
    if job.average is not None and job.average.start > steps:
        message = f"the average begins at step {job.average.start:,}, and the run has {plural(steps, 'step')}"
        raise error("SH107", message, where="average.start", fix="Begin earlier, or train longer.")


def _note_late_evaluations(schedule: TrainSchedule, data: Datasets, report: Callable[..., object]) -> None:
    every = schedule.sync_schedule.steps_per_sync
    if "validation" in data.held_out and every > min(schedule.evaluate_every, schedule.steps):
        message = (
            f"lanes agree every {every} steps (sync.every times sync.rounds_per_sync): "
            f"the validation part, due every {schedule.evaluate_every}, is measured then and at the end"
        )
        report("note", message=message)


def _sampler_config(job: Job) -> SamplerConfig:
    """The job's sampler config. A relative path of a cost file is resolved against the job's directory."""
    sampler = job.data.sampler
    if isinstance(sampler, BalancedSamplerConfig | WeightedSamplerConfig) and (sampler.by or "").endswith(".npy"):
        return sampler.model_copy(update={"by": str(Path(job.base_dir, str(sampler.by)))})
    return sampler


def example_batch(data: Datasets, sampler: LaneSampler) -> Batch:
    """The first batch of the first lane, transformed as for the model."""
    batch = data.train.source.take(sampler.ids(0, 0))
    return data.train.transform(batch) if data.train.transform else batch


def _evaluation_interval(job: Job, steps_per_epoch: int) -> int:
    return job.evaluate.every_steps or (job.evaluate.every_epochs or 1) * steps_per_epoch


def build_loop(
    built: BuiltJob,
    paths: RunPaths,
    *,
    session: TrainingSession,
    stream: EventWriter,
    has_state: bool,
    trace: bool = False,
    output: RunOutput | None = None,
) -> tuple[Loop, StepContext]:
    """Build the worker's loop with its reporter, store and strategy. Also returns the context of the strategy. Without
    `output`, `paths` is the run's directory."""
    job = built.job
    output = output or DirectoryOutput(paths)
    best = BestMetric(job.best)
    user_watchers = [_make_watcher(name, paths, job) for name in job.watchers]
    watchers = [best, *([EarlyStopping(job.stop_early)] if job.stop_early else []), *user_watchers]
    reporter = Reporter(stream, watchers)
    watch = WatchLocally(reporter, user_watchers)
    watch.attach(_attached(built, paths))
    stats = StepStats(reporter, every_step=bool(user_watchers) or trace)
    progress = Progress(
        sampler=built.sampler,
        task=built.task,
        reporter=reporter,
        stats=stats,
        activity=session.activity,
        best=best,
        has_state=has_state,
    )
    progress.source = built.data.train.source
    context = StepContext(
        sampler=built.sampler,
        batches=_watched_batches(make_batch_loader(built, report=reporter.report), watch),
        task=built.task,
        evaluator=built.evaluator,
        store=open_store(job, output, report=reporter.report),
        peers=session.peers,
        progress=progress,
        activity=session.activity,
        stats=stats,
        report=reporter.report,
        place_chunks=session.place_chunks,
    )
    strategy = built.model.make_strategy(context)
    session.activity.moved_bytes = strategy.moved_bytes
    if trace:
        reporter.watchers.append(StateTrace(output.append_trace, strategy.state))
    loop = Loop(
        built.train_schedule,
        strategy=strategy,
        progress=progress,
        splits={name: part for name, part in built.data.held_out.items() if name != "test" or job.evaluate.test},
        store=context.store,
        membership=session.membership,
        conclude=partial(conclude_run, built, output, progress, context.store),
        leave_reason=session.leave_reason,
    )
    loop.watch = watch
    return loop, context


def _attached(built: BuiltJob, paths: RunPaths) -> AttachedWorker | None:
    if not isinstance(built.model, WholeJobModel):
        return None
    replica = built.model.replica
    steps = built.train_schedule.steps
    return AttachedWorker(replica.model, replica.every_optimizer, replica.device, str(paths.root), steps)


def _watched_batches(batches: BatchLoader, watch: WatchLocally) -> Any:
    return WatchedBatches(batches, watch) if watch else batches


def conclude_run(
    built: BuiltJob, output: RunOutput, progress: Progress, store: CheckpointStore, final: FinalModel
) -> None:
    """Export the model, wait for the last save, and report `finished`. May be repeated after a crash."""
    job, reporter, began = built.job, progress.reporter, time.perf_counter()
    info = {
        "job": job.dump(),
        "step": progress.step,
        "run_weights_sha256": final.weights_sha256,
        "metrics": progress.metrics,
        **Fitted.of(built.data.train.source).model_info(),
        "example": describe_example(built.example.inputs),
        "code": pack_model_code(output.paths.model, job.base_dir),
    }
    final.export(
        output.paths.model,
        example_inputs=built.example.inputs,
        program="program" in job.export,
        emit=reporter.report,
        info=info,
    )
    output.publish_model()
    exported_s = time.perf_counter() - began
    store.wait()
    reporter.report(
        "finished",
        step=progress.step,
        weights_sha256=final.weights_sha256,
        state_sha256=final.state_sha256,
        samples_seen=built.sampler.samples_before(progress.step),
        metrics=progress.metrics,
        stopped=reporter.stop_reason,
        platform={
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cpu": torch.backends.cpu.get_cpu_capability(),
        },
        export_s=round(exported_s, 6),
    )


def pack_model_code(directory: Path, base_dir: str) -> list[str]:
    """The names of the user's modules, which are packed beside the model."""
    try:
        return pack_code(directory / CODE, base_dir)
    except OSError as problem:
        raise write_error(problem, directory) from problem


def make_batch_loader(built: BuiltJob, *, report: Report = no_report) -> BatchLoader:
    job = built.job
    return BatchLoader(
        built.data.train.source,
        built.sampler,
        seed=job.seed,
        lanes=job.lane_count,
        augment=built.data.augment,
        transform=built.data.train.transform,
        loader=job.data.loader,
        report=report,
    )


def open_store(job: Job, output: RunOutput, *, report: Callable[..., object]) -> CheckpointStore:
    return CheckpointStore(
        output.store(job),
        job_sha256=job.resume_compatibility_sha256(),
        every=job.checkpoint.interval,
        keep=job.checkpoint.keep,
        keep_best=job.checkpoint.keep_best,
        metric_sign=job.best.sign,
        emit=report,
        name=output.namespace,
    )


def _make_watcher(ref: Any, paths: RunPaths, job: Job) -> Any:
    kind = import_ref(expand_alias(ref, field="watchers"), base_dir=job.base_dir)
    if not callable(kind):
        return kind
    if inspect.isclass(kind) and not hasattr(kind, "watch"):
        raise error("SH206", f"the class '{ref.name}' has no method watch(event)", where="watchers")
    args = dict(ref.args)
    if "directory" in inspect.signature(kind).parameters:
        folder = ref.name if ref.name in WATCH_ALIASES else "tensorboard"
        args.setdefault("directory", str(paths.root / folder))
    with wrap_user_errors("SH208", f"watchers {ref.name}"):
        made = kind(**args)
    if not hasattr(made, "watch"):
        raise error("SH206", f"'{ref.name}' has no method watch(event)", where="watchers")
    return made
