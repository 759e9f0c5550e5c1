"""The probe process, which the driver starts: answers the questions of PROBES for a job or a run."""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.data import report
from shoal.data.augment_rng import Augment
from shoal.data.batch import Batch
from shoal.data.cluster_report import cluster_report
from shoal.data.clusters import ClusteredSource
from shoal.data.datasets import DatasetSplit, bind_ref, leaks_between_sources, open_datasets
from shoal.data.fitted import Fitted
from shoal.data.prefetch import BatchBuilder
from shoal.data.source import open_source
from shoal.data.split import split
from shoal.errors import error, plural
from shoal.events import EventWriter
from shoal.fleet.process_main import run_reporting_errors
from shoal.lanes.passes import ComputeLane, MultiPassReplica
from shoal.lanes.reduction_tree import TreeSum
from shoal.lanes.replica import LaneSum, add
from shoal.lanes.torch_setup import prepare_torch
from shoal.sharding.build_replica import unsharded_job
from shoal.spec.data import DataConfig, FoldSplitConfig
from shoal.spec.job import Job
from shoal.spec.load import load_run_job
from shoal.spec.run_paths import RunPaths, cache_directory
from shoal.spec.seeds import AUGMENT
from shoal.tasks.evaluation import Evaluator
from shoal.tasks.model import build_task
from shoal.tasks.optimizer import check_task
from shoal.tasks.user_errors import wrap_user_errors
from shoal.train.build import BuiltJob, build
from shoal.train.profile import profile_job
from shoal.train.shape import describe_shape
from shoal.train.trained_replica import build_trained_replica


def main() -> None:
    parser = argparse.ArgumentParser(prog="shoal.train.probe_main")
    parser.add_argument("--seat", type=int)
    parser.add_argument("--run", required=True)
    parser.add_argument("question", choices=sorted(PROBES))
    parser.add_argument("arguments", type=json.loads)
    arguments = parser.parse_args()
    paths = RunPaths.at(arguments.run)

    def answer(stream: EventWriter) -> None:
        written = load_run_job(paths.job)
        job = unsharded_job(written)
        prepare_torch(job)
        if arguments.question == "check" and job.shard != written.shard:
            check_task(written, build_task(written))
        stream.emit("answer", **PROBES[arguments.question](job, paths, stream, **arguments.arguments))

    sys.exit(run_reporting_errors(EventWriter(paths.events, "clerk"), answer))


def check(job: Job, paths: RunPaths, stream: EventWriter) -> dict[str, Any]:
    """Build everything, run one real step, and measure shapes, time and memory."""
    notes: list[str] = []

    def report(kind: str, **fields: Any) -> None:
        notes.extend([fields["message"]] if kind == "note" else [])
        stream.emit(kind, **fields)

    built = build(job, cache_dir=cache_directory(), report=report)
    replica, sampler = built.replica, built.sampler
    start = time.perf_counter()
    passes = LonePasses(built)
    replica.begin_step()
    with wrap_user_errors("SH413", "one step"):
        if isinstance(replica, MultiPassReplica):
            loss = float(replica.take_step(0, passes))
        else:
            total = passes.total(lambda lane, batch, share: replica.forward_backward(0, lane, batch, share=share))
            assert total is not None
            loss = float(replica.apply(0, total))  # one update with the whole batch, whichever sync the job has
    notes += _loss_notes(built, has_weight=passes.has_weight)
    seconds = time.perf_counter() - start
    part = next(iter(built.data.held_out.values()), None)
    if part is not None:
        sample = DatasetSplit(part.name, part.source, part.ids[: job.batch_size], part.transform)
        metrics = built.evaluator.evaluate(replica, sample)
    else:
        metrics = {}
    tensors = (*replica.model.parameters(), *replica.model.buffers())
    kept = (value for one in replica.every_optimizer for state in one.state.values() for value in state.values())
    state = sum(t.numel() * t.element_size() for t in kept if torch.is_tensor(t))
    return {
        "samples": built.data.sizes,
        "skipped": built.data.skipped_rows,
        "steps": built.train_schedule.steps,
        "steps_per_epoch": sampler.steps_per_epoch,
        "batch": {"inputs": [_shape(v) for v in built.example.inputs], "target": _shape(built.example.target)},
        "parameters": sum(p.numel() for p in replica.model.parameters()),
        "trainable": sum(p.numel() for p in replica.trainable),
        "weights_bytes": sum(t.numel() * t.element_size() for t in tensors),
        "optimizer_bytes": state,
        "gradient_bytes": sum(p.numel() * p.element_size() for p in replica.trainable),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "step_s": seconds,
        "loss": loss,
        "metrics": metrics,
        "device": str(replica.device),
        "moving_buffers": replica.moving_buffers.names,
        "notes": notes,
    }


def _loss_notes(built: BuiltJob, *, has_weight: bool) -> list[str]:
    """What the user must know about the loss."""
    sync, shares_batch, notes = built.job.sync, built.job.lane_count > 1, []
    if built.task.has_untrained_parameters:
        notes.append("the loss has parameters of its own, which are not trained: a Task's model may contain the loss")
    if shares_batch and has_weight and (sync.kind == "local" or (sync.kind == "server" and sync.staleness)):
        notes.append(
            "the loss has a weight: each lane divides by its own weight, because lanes update by themselves with this "
            "`sync`; with `sync: lanes` they divide by the weight of the whole batch"
        )
    if shares_batch and not has_weight and not built.task.knows_divisor:
        notes.append(
            "the loss returns a mean, and lanes are averaged by their numbers of samples: if it divides by anything "
            "else (tokens, weights, a mask), let it return (sum, weight), or another number of `lanes` trains another "
            "objective"
        )
    elif shares_batch and not has_weight and _counts_no_samples(built.example):
        notes.append(
            f"the target {list(built.example.target.shape)} of a batch of {plural(built.example.size, 'sample')} has "
            "another number of rows, and lanes are averaged by their samples: if batches differ in it, let the loss "
            "return (sum, weight), or name `ignore_index` in the args of CrossEntropyLoss; collate must drop no sample"
        )
    return notes


def _counts_no_samples(batch: Batch) -> bool:
    """Whether no dimension of the target is the number of samples."""
    return torch.is_tensor(batch.target) and batch.target.dim() > 0 and batch.size not in batch.target.shape


class LonePasses:
    """The lanes of the first step, all computed here. See Passes."""

    keeps_undo = False

    def __init__(self, built: BuiltJob) -> None:
        self._lanes, self.has_weight = built.job.lane_count, False
        self._batches = {lane: _first_batch(built, lane) for lane in range(self._lanes)}
        self._samples = sum(batch.size for batch in self._batches.values() if batch)

    def total(self, compute: ComputeLane) -> LaneSum | None:
        sums: TreeSum[LaneSum] = TreeSum(self._lanes, add)
        for lane, batch in self._batches.items():
            with wrap_user_errors("SH401", f"one step, lane {lane}"):
                sums.push_lane(lane, compute(lane, batch, batch.size / self._samples) if batch else None)
        total = sums.total()
        self.has_weight = self.has_weight or (total is not None and total.count is not None)
        return total


def _first_batch(built: BuiltJob, lane: int) -> Batch | None:
    """The batch of a lane at step 0, on the replica's device; None if it has no samples."""
    part, augment, ids = built.data.train, built.data.augment, built.sampler.ids(0, lane)
    if not len(ids):
        return None
    augmentation = Augment.of(augment) if augment else None
    batch = BatchBuilder(part.source, built.job.seed, AUGMENT, part.transform, augmentation).build((0, lane), ids)
    return batch.to(built.replica.device)


def _shape(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, dict):
        return {k: _shape(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_shape(v) for v in value]
    return type(value).__name__


def describe_split(job: Job, paths: RunPaths, stream: EventWriter, *, export: str | None = None) -> dict[str, Any]:
    """Describe the split and its leaks."""
    data = job.data.model_copy(update={"leaks": "ignore"})
    folds = _folds(data)
    if isinstance(data.split, FoldSplitConfig):
        data = data.model_copy(update={"split": data.split.model_copy(update={"fold": folds[0]})})
    assembled = open_datasets(data, seed=job.seed, base_dir=job.base_dir, cache_dir=cache_directory())
    source = assembled.train.source
    columns = assembled.columns or source
    parts = {n: split(data.split, columns, seed=job.seed, fold=n) for n in folds}
    answer = report.split_report(columns, parts, data.split)
    answer["clusters"] = cluster_report(columns, parts) if isinstance(columns, ClusteredSource) else None
    own = {n: {"size": len(p)} for n, p in assembled.held_out.items() if p.source is not source}
    leaks = [str(leak) for leak in leaks_between_sources(assembled)]
    if export is not None:
        report.export_split(parts, columns, Path(export))
    return {"report": answer, "own_sources": own, "leaks_between_sources": leaks, "exported": export}


def _folds(data: DataConfig) -> list[int]:
    if not isinstance(data.split, FoldSplitConfig):
        return [0]
    return list(range(data.split.folds)) if data.split.fold is None else [data.split.fold]


def evaluate(
    job: Job,
    paths: RunPaths,
    stream: EventWriter,
    *,
    weights: str,
    part: str | None,
    source: dict[str, Any] | None,
    rows: str = "",
) -> dict[str, Any]:
    """Compute the metrics of a finished run on a split of its data, or on other data."""
    task, replica = build_trained_replica(job, weights=weights, rows=rows, report=stream.emit)
    data = open_datasets(job.data, seed=job.seed, base_dir=job.base_dir, cache_dir=cache_directory())
    parts = {"train": data.train, **data.held_out}
    if source is not None:
        spec = DataConfig.model_validate({"source": source}).source
        other = open_source(
            spec,
            base_dir=job.base_dir,
            on_bad_row=job.data.on_bad_row,
            cache_dir=str(cache_directory()),
            fitted=Fitted.of(data.train.source),
        )
        transform = bind_ref(job.data.transform, base_dir=job.base_dir)
        parts, part = {"data": DatasetSplit("data", other, np.arange(len(other), dtype=np.int64), transform)}, "data"
    if part is not None and part not in parts:
        raise error("SH606", f"the run has no part '{part}'", where="--part", fix=f"Use one of: {', '.join(parts)}.")
    chunk = job.evaluate.batch_size or job.batch_size
    evaluator = Evaluator(task, lanes=job.lane_count, chunk_size=chunk, seed=job.seed, loader=job.data.loader)
    chosen = [part] if part else [name for name in parts if name != "train"] or ["train"]
    return {
        "metrics": {name: evaluator.evaluate(replica, parts[name]) for name in chosen},
        "samples": {name: len(parts[name]) for name in chosen},
    }


def compress(job: Job, paths: RunPaths, stream: EventWriter, **arguments: Any) -> dict[str, Any]:
    """One action of compression; see `shoal.train.compression`."""
    from shoal.train.compression import actions

    return actions.answer(job, paths, stream, **arguments)


def shrink(job: Job, paths: RunPaths, stream: EventWriter, **arguments: Any) -> dict[str, Any]:
    """Cut the state of a run's first leg."""
    from shoal.train.compression import shrink as cutting

    return cutting.answer(job, stream, **arguments)


def predict(job: Job, paths: RunPaths, stream: EventWriter, **arguments: Any) -> dict[str, Any]:
    """A share of the predictions of `shoal predict`."""
    from shoal.train.predict import write_predictions

    return write_predictions(job, stream, **arguments)


def export(job: Job, paths: RunPaths, stream: EventWriter, **arguments: Any) -> dict[str, Any]:
    """The model of a finished run in another format."""
    from shoal.train.export_formats import write_model

    return write_model(job, **arguments)


PROBES: dict[str, Callable[..., dict[str, Any]]] = {
    "check": check,
    "split": describe_split,
    "measure": profile_job,
    "evaluate": evaluate,
    "shape": describe_shape,
    "compress": compress,
    "shrink": shrink,
    "predict": predict,
    "export": export,
}


if __name__ == "__main__":
    main()
