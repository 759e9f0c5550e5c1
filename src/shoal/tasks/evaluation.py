"""Exact evaluation: chunk c of a split belongs to lane c modulo lanes; no sample is padded, repeated or dropped."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shoal.checkpoint.state_format import pack_state, unpack_state
from shoal.collectives.outcome import Discarded
from shoal.data.batch import Batch
from shoal.data.batch_loader import evaluation_batches
from shoal.data.datasets import DatasetSplit
from shoal.data.prefetch import Report, no_report
from shoal.lanes.loss import Loss
from shoal.lanes.replica import Replica
from shoal.net.errors import LinkError
from shoal.spec import seeds
from shoal.spec.data import LoaderConfig
from shoal.tasks.metrics import MetricAccumulator, are_logits, disable_distributed_sync, merge_lanes
from shoal.tasks.task import Task
from shoal.tasks.user_errors import wrap_user_errors

Gather = Callable[[bytes], dict[int, bytes] | Discarded]
EvaluateBatch = Callable[[Batch, str], tuple[Any, Any]]
"""Returns loss and predictions, or None for both on ranks without the model's output. The text describes the work in
error messages."""
OnChunk = Callable[[], None]


def merge_results(results: Mapping[int, bytes], template: MetricAccumulator) -> dict[str, float]:
    """The metrics from all members' results, added in lane order. LinkError if a member sent something else."""
    by_lane: dict[int, MetricAccumulator] = {}
    for seat, content in results.items():
        states = unpack_state(content)
        if not isinstance(states, dict) or not all(type(lane) is int for lane in states):
            raise LinkError(f"worker-{seat} sent something that is no result of an evaluation")
        by_lane |= {lane: template.with_state(state) for lane, state in states.items()}
    return merge_lanes([by_lane[lane] for lane in sorted(by_lane)])


class Evaluator:
    """Evaluates a replica on splits of the data: a pure function of its weights, independent of earlier evaluations.

    Metrics are built at the first batch, which gives their shapes.
    """

    def __init__(
        self,
        task: Task,
        *,
        lanes: int,
        chunk_size: int,
        seed: int,
        loader: LoaderConfig | None = None,
        report: Report = no_report,
    ) -> None:
        self._task = task
        self._lanes = lanes
        self._chunk_size = chunk_size
        self._seed = seed
        self._loader = loader
        self._report = report
        self._metrics: dict[str, Any] | None = None

    def evaluate(self, replica: Replica, split: DatasetSplit) -> dict[str, float]:
        """Evaluate the whole split in this process."""
        return merge_lanes(list(self._accumulate(replica, split, range(self._lanes)).values()))

    def evaluate_distributed(
        self,
        replica: Replica,
        split: DatasetSplit,
        *,
        lanes: Collection[int],
        gather: Gather,
        is_aborted: Callable[[], bool],
        on_chunk: Callable[[], None],
    ) -> dict[str, float] | Discarded:
        """Evaluate the chunks of this worker's lanes, gather all workers' results, and merge them in lane order.
        `on_chunk` is called for each chunk."""
        own = self._accumulate(replica, split, lanes, is_aborted=is_aborted, on_chunk=on_chunk)
        if is_aborted():
            return Discarded("asked to stop")
        results = gather(pack_state({lane: one.state() for lane, one in own.items() if lane in lanes}))
        if isinstance(results, Discarded):
            return results
        try:
            return merge_results(results, next(iter(own.values())))
        except LinkError as failure:
            return Discarded(str(failure))

    def chunks_of(self, split: DatasetSplit, lanes: Collection[int]) -> list[int]:
        """The chunks that belong to these lanes."""
        total = -(-len(split.ids) // self._chunk_size)
        return [c for c in range(total) if c % self._lanes in lanes]

    def accumulate_in_lockstep(
        self,
        replica: Replica,
        split: DatasetSplit,
        chunks: Sequence[int],
        *,
        passes: int,
        has_output: bool,
        evaluate_batch: EvaluateBatch,
        on_chunk: OnChunk,
    ) -> dict[int, MetricAccumulator]:
        """Results of these chunks by lane, for a sharded model, which all its ranks run at the same time.

        There are `passes` forward passes after a first one, which shows the type of the predictions. Ranks without
        output return no entry; the others at least one.
        """
        replica.model.eval()
        found: dict[int, MetricAccumulator] = {}
        ((_, first),) = self._batches(split, [0])
        _, output = self._evaluate_chunk(replica, split, 0, first, evaluate_batch)
        logits = are_logits(output, self._task.logits)
        if has_output:
            found[-1] = self._new_accumulator(output, first.target, replica.device, logits)
        batches = self._batches(split, chunks)
        for index in range(passes):
            on_chunk()
            chunk, batch = next(batches) if index < len(chunks) else (0, first)
            loss, output = self._evaluate_chunk(replica, split, chunk, batch, evaluate_batch)
            if has_output and index < len(chunks):
                lane = chunk % self._lanes
                if lane not in found:
                    found[lane] = self._new_accumulator(output, batch.target, replica.device, logits)
                found[lane].update(loss, output, batch)
        return found

    def _evaluate_chunk(
        self, replica: Replica, split: DatasetSplit, chunk: int, batch: Batch, evaluate_batch: EvaluateBatch
    ) -> tuple[Any, Any]:
        replica.rng.seed_all(self._seed, seeds.EVALUATION, chunk)
        return evaluate_batch(batch, f"evaluation of {split.name}, chunk {chunk}")

    @torch.no_grad()
    def _accumulate(
        self,
        replica: Replica,
        split: DatasetSplit,
        lanes: Collection[int],
        *,
        is_aborted: Callable[[], bool] = lambda: False,
        on_chunk: Callable[[], None] = lambda: None,
    ) -> dict[int, MetricAccumulator]:
        """Results of these lanes, by lane, with at least one entry, which serves as template for the metrics."""
        model = replica.model
        model.eval()
        chunks = self.chunks_of(split, lanes)
        found: dict[int, MetricAccumulator] = {}
        logits = self._task.logits
        if chunks[:1] != [0] and (not chunks or logits is None):  # the first chunk shows the type of the predictions
            for _, batch, _, output in self._evaluated_chunks(replica, split, [0]):
                logits = are_logits(output, logits)
                if not chunks:
                    found[-1] = self._new_accumulator(output, batch.target, replica.device, logits)
        for chunk, batch, loss, output in self._evaluated_chunks(replica, split, chunks):
            on_chunk()
            if is_aborted():
                break
            logits = are_logits(output, logits)
            lane = chunk % self._lanes
            if lane not in found:
                found[lane] = self._new_accumulator(output, batch.target, replica.device, logits)
            found[lane].update(loss, output, batch)
        return found

    def _evaluated_chunks(
        self, replica: Replica, split: DatasetSplit, chunks: Iterable[int]
    ) -> Iterator[tuple[int, Batch, Loss, Any]]:
        for chunk, batch in self._batches(split, chunks):
            batch = batch.to(replica.device)
            replica.rng.seed_all(self._seed, seeds.EVALUATION, chunk)
            if self._task.carries:
                self._task.carry = {}
            with replica.autocast_context(), wrap_user_errors("SH401", f"evaluation of {split.name}, chunk {chunk}"):
                if self._task.needs_predictions:
                    loss, output = self._task.evaluate(replica.model, batch)
                else:
                    loss, output = self._task.loss(replica.model, batch), None
            yield chunk, replace(batch, target=self._task.target(replica.model, batch)), loss, output

    def _batches(self, split: DatasetSplit, chunks: Iterable[int]) -> Iterator[tuple[int, Batch]]:
        return evaluation_batches(
            split.source,
            split.ids,
            chunk_size=self._chunk_size,
            chunks=chunks,
            transform=split.transform,
            loader=self._loader,
            seed=self._seed,
            report=self._report,
        )

    def _new_accumulator(self, output: Any, target: Any, device: torch.device, logits: bool) -> MetricAccumulator:
        if self._metrics is None:
            self._metrics = {
                name: disable_distributed_sync(m.to(device)) for name, m in self._task.metrics((output, target)).items()
            }
        return MetricAccumulator(self._metrics, logits=logits)
