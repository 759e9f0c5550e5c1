"""Exact evaluation: chunk c of a part belongs to lane c modulo lanes; no sample is padded, repeated or dropped."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from shoal.checkpoint.live import pack, unpack
from shoal.data.assemble import Part
from shoal.data.batch import Batch
from shoal.data.feed import evaluation
from shoal.parallel.replica import Loss, Replica
from shoal.parallel.sync.base import Discarded
from shoal.spec import seeds
from shoal.spec.data import Loader
from shoal.train.blame import blaming
from shoal.train.metrics import Accumulator, are_logits, by_itself, merge
from shoal.train.task import Task

Gather = Callable[[bytes], dict[int, bytes] | Discarded]
Look = Callable[[Batch, str], tuple[Any, Any]]
"""Loss and predictions; None for both where others get them. Says what it was doing if that fails."""
Each = Callable[[], None]


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

    def measure(self, replica: Replica, part: Part) -> dict[str, float]:
        """All of it, by this process alone."""
        return merge(list(self._accumulate(replica, part, range(self._lanes)).values()))

    def share(
        self,
        replica: Replica,
        part: Part,
        *,
        lanes: Collection[int],
        gather: Gather,
        given_up: Callable[[], bool],
        each: Callable[[], None],
    ) -> dict[str, float] | Discarded:
        """My lanes' chunks, then everybody's results, merged in the order of lanes. `each` is called per chunk."""
        mine = self._accumulate(replica, part, lanes, given_up=given_up, each=each)
        if given_up():
            return Discarded("asked to stop")
        results = gather(pack({lane: one.state() for lane, one in mine.items() if lane in lanes}))
        if isinstance(results, Discarded):
            return results
        whole: dict[int, Accumulator] = {}
        template = next(iter(mine.values()))
        for content in results.values():
            for lane, state in unpack(content).items():
                whole[lane] = template.like(state)
        return merge([whole[lane] for lane in sorted(whole)])

    def chunks_of(self, part: Part, lanes: Collection[int]) -> list[int]:
        """Those that belong to these lanes."""
        total = -(-len(part.ids) // self._chunk)
        return [c for c in range(total) if c % self._lanes in lanes]

    def in_turns(
        self, replica: Replica, part: Part, mine: Sequence[int], *, turns: int, speaks: bool, look: Look, each: Each
    ) -> dict[int, Accumulator]:
        """What these chunks add up to, by lane, where the model is run by several at the same time: so many turns, and
        one before that shows what predictions are. Nothing for who does not speak, and else at least one entry."""
        replica.model.eval()
        found: dict[int, Accumulator] = {}
        ((_, first),) = self._batches(part, [0])
        _, output = self._turn(replica, part, 0, first, look)
        logits = are_logits(output, self._task.logits)
        if speaks:
            found[-1] = self._start(output, first.target, replica.device, logits)
        coming = self._batches(part, mine)
        for turn in range(turns):
            each()
            chunk, batch = next(coming) if turn < len(mine) else (0, first)
            loss, output = self._turn(replica, part, chunk, batch, look)
            if speaks and turn < len(mine):
                lane = chunk % self._lanes
                if lane not in found:
                    found[lane] = self._start(output, batch.target, replica.device, logits)
                found[lane].add(loss, output, batch)
        return found

    def _turn(self, replica: Replica, part: Part, chunk: int, batch: Batch, look: Look) -> tuple[Any, Any]:
        replica.chance.fully(self._seed, seeds.EVALUATION, chunk)
        return look(batch, f"evaluation of {part.name}, chunk {chunk}")

    @torch.no_grad()
    def _accumulate(
        self,
        replica: Replica,
        part: Part,
        lanes: Collection[int],
        *,
        given_up: Callable[[], bool] = lambda: False,
        each: Callable[[], None] = lambda: None,
    ) -> dict[int, Accumulator]:
        """What these lanes add up to, by lane. There is at least one entry: it shows what metrics look like."""
        model = replica.model
        model.eval()
        mine = self.chunks_of(part, lanes)
        found: dict[int, Accumulator] = {}
        logits = self._task.logits
        if mine[:1] != [0] and (not mine or logits is None):  # the first chunk tells what predictions are
            for _, batch, _, output in self._chunks(replica, part, [0]):
                logits = are_logits(output, logits)
                if not mine:
                    found[-1] = self._start(output, batch.target, replica.device, logits)
        for chunk, batch, loss, output in self._chunks(replica, part, mine):
            each()
            if given_up():
                break
            logits = are_logits(output, logits)
            lane = chunk % self._lanes
            if lane not in found:
                found[lane] = self._start(output, batch.target, replica.device, logits)
            found[lane].add(loss, output, batch)
        return found

    def _chunks(self, replica: Replica, part: Part, chunks: Iterable[int]) -> Iterator[tuple[int, Batch, Loss, Any]]:
        for chunk, batch in self._batches(part, chunks):
            batch = batch.to(replica.device)
            replica.chance.fully(self._seed, seeds.EVALUATION, chunk)
            with replica.casting(), blaming("SH401", f"evaluation of {part.name}, chunk {chunk}"):
                loss, output = self._task.evaluate(replica.model, batch)
            yield chunk, batch, loss, output

    def _batches(self, part: Part, chunks: Iterable[int]) -> Iterator[tuple[int, Batch]]:
        return evaluation(
            part.source,
            part.ids,
            chunk=self._chunk,
            chunks=chunks,
            transform=part.transform,
            loader=self._loader,
            seed=self._seed,
        )

    def _start(self, output: Any, target: Any, device: torch.device, logits: bool) -> Accumulator:
        if self._metrics is None:
            self._metrics = {name: by_itself(m.to(device)) for name, m in self._task.metrics((output, target)).items()}
        return Accumulator(self._metrics, logits=logits)
