"""Quality per sample: the job's metric for every sample of a part, by a model that was loaded back from disk."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from shoal.compression.measure import drop_of
from shoal.data.batch import Batch
from shoal.data.batch_loader import evaluation_batches
from shoal.data.datasets import DatasetSplit
from shoal.errors import error
from shoal.lanes.replica import Replica
from shoal.lanes.rng import LaneRng
from shoal.spec import seeds
from shoal.spec.compression.measured import ModelFile, Quality
from shoal.spec.run_paths import write_atomically
from shoal.tasks.compressed import CompressedTask
from shoal.tasks.evaluation import Evaluator
from shoal.tasks.metrics import MetricAccumulator, are_logits, disable_distributed_sync, merge_lanes
from shoal.tasks.task import PlainTask, Task
from shoal.tasks.user_errors import wrap_user_errors
from shoal.train.compression.subject import Subject

TOLERANCE = 1e-3
_SCORES = TypeAdapter(list[float])


def judge(
    subject: Subject, parent: ModelFile, models: dict[str, ModelFile], *, part: str, known: Path
) -> list[Quality]:
    """Each model against the parent, sample by sample. `known` is the file that keeps the parent's scores."""
    best, split = subject.job.best, subject.part(part)
    own = _parent_scores(subject, parent, split, known)
    found = []
    for name, file in models.items():
        scores = own if file == parent else sample_scores(subject, file, split)
        drop, bound, least = drop_of(own, scores, sign=best.sign)
        found.append(
            Quality(
                name=name,
                part=part,
                metric=best.metric,
                samples=len(own),
                parent=fmean(own),
                value=fmean(scores),
                drop=drop,
                drop_bound=bound if math.isfinite(bound) else math.inf,
                smallest_bound=least,
                changed=sum(a != b for a, b in zip(own, scores, strict=True)),
            )
        )
    return found


def _parent_scores(subject: Subject, parent: ModelFile, split: DatasetSplit, known: Path) -> list[float]:
    """The same parent is judged against by every rung: its scores are computed once. A file that was cut off is not
    believed."""
    with contextlib.suppress(OSError, ValueError):
        kept = _SCORES.validate_json(known.read_bytes())
        if len(kept) == len(split.ids):
            return kept
    scores = sample_scores(subject, parent, split)
    _check_mean(subject, parent, split, fmean(scores))
    write_atomically(known, json.dumps(scores))
    return scores


def _check_mean(subject: Subject, parent: ModelFile, split: DatasetSplit, mean: float) -> None:
    """SH665 if an evaluation as the run makes it gives another value: samples by themselves then tell nothing."""
    job, task, model = subject.job, subject.task(parent.shape), subject.model(parent)
    replica = Replica(model, torch.optim.SGD(model.parameters()), task.loss, seed=job.seed)
    evaluator = Evaluator(
        task, lanes=job.lane_count, chunk_size=job.evaluate.batch_size or job.batch_size, seed=job.seed
    )
    whole = evaluator.evaluate(replica, split).get(job.best.metric, math.nan)
    if not math.isclose(mean, whole, rel_tol=TOLERANCE, abs_tol=1e-6):
        message = f"'{job.best.metric}' is {whole:.4g} in batches, and {mean:.4g} if each sample is evaluated by itself"
        fix = "Let the evaluation of a sample depend on neither the other samples nor random numbers."
        raise error("SH665", message, where="best.metric", fix=fix)


@torch.no_grad()
def sample_scores(subject: Subject, file: ModelFile, split: DatasetSplit) -> list[float]:
    """The metric of `best` for each sample. SH665 if it is not a mean over samples."""
    job, task, model = subject.job, subject.task(file.shape), subject.model(file)
    scorer, rng = _Scorer(task, job.best.metric), LaneRng(torch.device("cpu"))
    chunk = job.evaluate.batch_size or job.batch_size
    count = -(-len(split.ids) // chunk)
    for number, batch in evaluation_batches(
        split.source, split.ids, chunk_size=chunk, chunks=range(count), transform=split.transform, seed=job.seed
    ):
        rng.seed_all(job.seed, seeds.EVALUATION, number)
        with wrap_user_errors("SH401", f"evaluation of {split.name}"):
            scorer.add(model, batch)
    return scorer.finish()


class _Scorer:
    """Runs the model on whole batches and the user's loss and metric on single samples of its output."""

    def __init__(self, task: Task, metric: str) -> None:
        self._task, self._metric = task, metric
        self._is_plain = type(task.inner if isinstance(task, CompressedTask) else task) is PlainTask
        self._scores: list[float] = []
        self._labels: list[float] = []
        self._one: MetricAccumulator | None = None
        self._all: MetricAccumulator | None = None
        self._flat = False

    def add(self, model: nn.Module, batch: Batch) -> None:
        if self._all is not None and self._counts_hits(batch):
            loss, output = self._task.evaluate(model, batch)
            batch = replace(batch, target=self._task.target(model, batch))
            self._all.update(loss, output, batch)
            self._scores += (output.argmax(1) == batch.target).double().tolist()
            return
        for sample, runner in self._singles(model, batch):
            if self._task.carries:
                self._task.carry = {}
            if self._task.needs_predictions:
                loss, output = self._task.evaluate(runner, sample)
            else:
                loss, output = self._task.loss(runner, sample), None
            self._update(loss, output, replace(sample, target=self._task.target(model, sample)))

    def finish(self) -> list[float]:
        assert self._all is not None
        whole = merge_lanes([self._all]).get(self._metric, math.nan)
        if self._metric == "loss":  # samples of more labels count more, so that the mean is that of the part
            typical = fmean(self._labels) or 1.0
            pairs = zip(self._scores, self._labels, strict=True)
            self._scores = [score * (labels / typical) if labels else 0.0 for score, labels in pairs]
        if not math.isfinite(whole):
            raise error("SH403", f"'{self._metric}' over all samples is {whole}", where="best.metric")
        mean = fmean(self._scores)
        if not abs(mean - whole) <= TOLERANCE * max(1.0, abs(whole)):
            message = f"'{self._metric}' is {whole:.4g}, and its mean over samples is {mean:.4g}"
            fix = "Set `best.metric` to a mean over samples, such as accuracy or loss."
            raise error("SH665", message, where="best.metric", fix=fix)
        return self._scores

    def _counts_hits(self, batch: Batch) -> bool:
        """Whether the metric is the share of right classes, which needs no loop over samples."""
        assert self._all is not None
        metric = self._all.metrics.get(self._metric)
        if not isinstance(metric, MulticlassAccuracy) or metric.average != "micro" or metric.top_k != 1:
            return False
        return metric.ignore_index is None and self._flat and _is_flat(batch.target)

    def _singles(self, model: nn.Module, batch: Batch) -> Iterator[tuple[Batch, nn.Module]]:
        """Each sample with a module that gives its output: kept from the run of the whole batch, if the task is known
        to call the model once with exactly the inputs. A user's own task may do anything with the model."""
        output = None
        if self._is_plain and not any(isinstance(value, dict) for value in batch.inputs):
            output = model(*batch.inputs)
        kept = isinstance(output, Tensor) and output.dim() > 0 and len(output) == batch.size
        for index, sample in enumerate(batch.chunk(batch.size)):
            yield sample, _Kept(output[index : index + 1]) if kept and output is not None else model

    def _update(self, loss: Any, output: Any, sample: Batch) -> None:
        if self._one is None:
            wanted = {} if self._metric == "loss" else self._task.metrics((output, sample.target))
            metrics = {n: disable_distributed_sync(m) for n, m in wanted.items() if n == self._metric}
            logits = are_logits(output, self._task.logits)
            self._flat = isinstance(output, Tensor) and output.dim() == 2
            self._one, self._all = (MetricAccumulator(metrics, logits=logits) for _ in range(2))
        assert self._all is not None
        self._one.loss.zero_()
        self._one.count.zero_()
        for metric in self._one.metrics.values():
            metric.reset()
        for accumulator in (self._one, self._all):
            accumulator.update(loss, output, sample)
        score = merge_lanes([self._one]).get(self._metric)
        if score is None:
            raise error("SH409", f"the job computes no '{self._metric}'", where="best.metric")
        self._scores.append(score)
        self._labels.append(float(self._one.count))


def _is_flat(target: Any) -> bool:
    return isinstance(target, Tensor) and target.dim() == 1 and not target.is_floating_point()


class _Kept(nn.Module):
    """A model whose output is known."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self._output = output

    def forward(self, *inputs: Any) -> Tensor:
        return self._output
