"""Answers questions about a job or a run: `check`, `split`, `measure`, `evaluate`. A process that the driver starts."""

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

from shoal.checkpoint.export import load_weights
from shoal.data import report
from shoal.data.assemble import Part, assemble, bind, leaks_between_sources
from shoal.data.source import open_source
from shoal.data.split import split
from shoal.errors import error
from shoal.events import Stream
from shoal.parallel.replica import LaneSum, Replica, add
from shoal.parallel.sparse.loaded import bind_saved
from shoal.parallel.tree import TreeSum
from shoal.spec.data import Data, FoldSplit
from shoal.spec.job import Job
from shoal.spec.load import load_job
from shoal.spec.paths import RunPaths, cache_directory
from shoal.train.blame import blaming
from shoal.train.build import build, build_replica
from shoal.train.devices import pick_device
from shoal.train.evaluate import Evaluator
from shoal.train.forming import alone
from shoal.train.measure import measure
from shoal.train.worker import guarded, prepare_torch


def main() -> None:
    parser = argparse.ArgumentParser(prog="shoal.train.clerk")
    parser.add_argument("--seat", type=int)
    parser.add_argument("--run", required=True)
    parser.add_argument("question", choices=sorted(QUESTIONS))
    parser.add_argument("arguments", type=json.loads)
    asked = parser.parse_args()
    paths = RunPaths.at(asked.run)

    def answer(stream: Stream) -> None:
        job = alone(load_job(paths.job, check_names=False))
        prepare_torch(job)
        stream.emit("answer", **QUESTIONS[asked.question](job, paths, stream, **asked.arguments))

    sys.exit(guarded(Stream(paths.events, "clerk"), answer))


def check(job: Job, paths: RunPaths, stream: Stream) -> dict[str, Any]:
    """Build everything, make one real step, look at shapes, time and memory."""
    built = build(job, cache_dir=cache_directory(), tell=stream.emit)
    replica, dealer = built.replica, built.dealer
    start = time.perf_counter()
    sums: TreeSum[LaneSum] = TreeSum(job.lane_count, add)
    replica.begin()
    for lane in range(job.lane_count):
        ids = dealer.ids(0, lane)
        sums.lane(lane, _lane(built, ids, lane) if len(ids) else None)
    total = sums.total()
    assert total is not None
    loss = float(Replica.apply(replica, 0, total))  # one of the whole batch, however lanes agree
    seconds = time.perf_counter() - start
    part = next(iter(built.data.others.values()), None)
    if part is not None:
        few = Part(part.name, part.source, part.ids[: job.batch_size], part.transform)
        metrics = built.evaluator.measure(replica, few)
    else:
        metrics = {}
    tensors = (*replica.model.parameters(), *replica.model.buffers())
    state = sum(
        t.numel() * t.element_size() for s in replica.optimizer.state.values() for t in s.values() if torch.is_tensor(t)
    )
    return {
        "samples": built.data.sizes,
        "skipped": built.data.skipped,
        "steps": built.course.steps,
        "steps_per_epoch": dealer.steps_per_epoch,
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
        "moving_buffers": replica.moving.names,
    }


def _lane(built: Any, ids: Any, lane: int) -> LaneSum:
    part = built.data.train
    batch = part.source.take(ids)
    batch = part.transform(batch) if part.transform else batch
    with blaming("SH401", f"one step, lane {lane}"):
        share = len(ids) / built.dealer.total(0)
        result: LaneSum = built.replica.forward_backward(0, lane, batch.to(built.replica.device), share=share)
    return result


def _shape(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, dict):
        return {k: _shape(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_shape(v) for v in value]
    return type(value).__name__


def describe_split(job: Job, paths: RunPaths, stream: Stream, *, export: str | None = None) -> dict[str, Any]:
    """What the split looks like, and where it leaks."""
    data = job.data.model_copy(update={"leaks": "ignore"})
    folds = _folds(data)
    if isinstance(data.split, FoldSplit):
        data = data.model_copy(update={"split": data.split.model_copy(update={"fold": folds[0]})})
    assembled = assemble(data, seed=job.seed, base_dir=job.base_dir, cache_dir=cache_directory())
    source = assembled.train.source
    parts = {n: split(data.split, source, seed=job.seed, fold=n) for n in folds}
    answer = report.report(source, parts, data.split)
    own = {n: {"size": len(p)} for n, p in assembled.others.items() if p.source is not source}
    leaks = [str(leak) for leak in leaks_between_sources(assembled)]
    if export is not None:
        report.export(parts, source, Path(export))
    return {"report": answer, "own_sources": own, "leaks_between_sources": leaks, "exported": export}


def _folds(data: Data) -> list[int]:
    if not isinstance(data.split, FoldSplit):
        return [0]
    return list(range(data.split.folds)) if data.split.fold is None else [data.split.fold]


def evaluate(
    job: Job,
    paths: RunPaths,
    stream: Stream,
    *,
    weights: str,
    part: str | None,
    source: dict[str, Any] | None,
    rows: str = "",
) -> dict[str, Any]:
    """Metrics of a finished run on a part of its data, or on other data."""
    task, replica = build_replica(
        job.model_copy(update={"init_from": None}),
        pick_device(job.device),
        steps=1,
        steps_per_epoch=1,
        tell=stream.emit,
    )
    if replica.tables:
        bind_saved(replica.tables, rows, seed=job.seed)
    replica.model.load_state_dict(load_weights(weights))
    data = assemble(job.data, seed=job.seed, base_dir=job.base_dir, cache_dir=cache_directory())
    parts = {"train": data.train, **data.others}
    if source is not None:
        spec = Data.model_validate({"source": source}).source
        other = open_source(
            spec,
            base_dir=job.base_dir,
            on_bad_row=job.data.on_bad_row,
            cache_dir=str(cache_directory()),
            like=data.train.source,
        )
        transform = bind(job.data.transform, base_dir=job.base_dir)
        parts, part = {"data": Part("data", other, np.arange(len(other), dtype=np.int64), transform)}, "data"
    if part is not None and part not in parts:
        raise error("SH606", f"the run has no part '{part}'", where="--part", fix=f"Use one of: {', '.join(parts)}.")
    chunk = job.evaluate.batch_size or job.batch_size
    evaluator = Evaluator(task, lanes=job.lane_count, chunk=chunk, seed=job.seed, loader=job.data.loader)
    chosen = [part] if part else [name for name in parts if name != "train"] or ["train"]
    return {
        "metrics": {name: evaluator.measure(replica, parts[name]) for name in chosen},
        "samples": {name: len(parts[name]) for name in chosen},
    }


QUESTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "check": check,
    "split": describe_split,
    "measure": measure,
    "evaluate": evaluate,
}


if __name__ == "__main__":
    main()
