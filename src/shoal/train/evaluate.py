"""Exact evaluation: chunk c of a part belongs to lane c modulo lanes; no sample is padded, repeated or dropped."""

from __future__ import annotations

from typing import Any

import torch

from shoal.data.assemble import Part
from shoal.data.feed import evaluation
from shoal.parallel.replica import Replica
from shoal.spec import seeds
from shoal.spec.data import Loader
from shoal.train.blame import blaming
from shoal.train.metrics import Accumulator, are_logits, merge
from shoal.train.task import Task


class Evaluator:
    """Measures a replica on parts of the data: a pure function of its weights, whatever was measured before.

    Metrics are built at the first batch, which shows their shapes.
    """

    def __init__(self, task: Task, *, lanes: int, chunk: int, seed: int, loader: Loader | None = None) -> None:
        self._task = task
        self._lanes = lanes
        self._chunk = chunk
        self._seed = seed
        self._loader = loader
        self._metrics: dict[str, Any] | None = None

    @torch.no_grad()
    def measure(self, replica: Replica, part: Part) -> dict[str, float]:
        model = replica.model
        model.eval()
        lanes: list[Accumulator] = []
        chunks = range(-(-len(part.ids) // self._chunk))
        for chunk, batch in evaluation(
            part.source,
            part.ids,
            chunk=self._chunk,
            chunks=chunks,
            transform=part.transform,
            loader=self._loader,
            seed=self._seed,
        ):
            batch = batch.to(replica.device)
            replica.chance.fully(self._seed, seeds.EVALUATION, chunk)
            with replica.casting(), blaming("SH401", f"evaluation of {part.name}, chunk {chunk}"):
                loss, output = self._task.evaluate(model, batch)
            if not lanes:
                lanes = self._start(output, batch.target, replica.device)
            lanes[chunk % self._lanes].add(loss, output, batch)
        return merge(lanes)

    def _start(self, output: Any, target: Any, device: torch.device) -> list[Accumulator]:
        if self._metrics is None:
            self._metrics = {name: m.to(device) for name, m in self._task.metrics((output, target)).items()}
        logits = are_logits(output, self._task.logits)
        return [Accumulator(self._metrics, logits=logits) for _ in range(self._lanes)]
