"""The batch of a lane at a step, prefetched where that helps.

A batch is a pure function of (seed, step, lane). Threads, processes and the order of requests change when it is
built, never its content.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing

from shoal.data.augment_rng import Augment
from shoal.data.batch import Batch
from shoal.data.loader_processes import BatchKey
from shoal.data.prefetch import BatchBuilder, BlockPrefetcher, Prefetcher, Report, Sampler, make_prefetcher, no_report
from shoal.data.source import DataSource, Ids
from shoal.spec.data import LoaderConfig
from shoal.spec.seeds import AUGMENT, EVALUATION

_MOST_TOGETHER = 16
"""Steps of a lane whose rows are gathered together from storage blocks: at most about as many as a block has."""


class BatchLoader:
    """The batches of a run. Belongs to the training thread. Serves all lanes until `set_lanes`."""

    def __init__(
        self,
        source: DataSource,
        sampler: Sampler,
        *,
        seed: int,
        lanes: int,
        augment: Callable[..., Batch] | None = None,
        transform: Callable[[Batch], Batch] | None = None,
        loader: LoaderConfig | None = None,
        report: Report = no_report,
    ) -> None:
        loader = loader or LoaderConfig()
        builder = BatchBuilder(source, seed, AUGMENT, transform, Augment.of(augment) if augment else None)
        self._build = builder.build
        self._sampler = sampler
        self._prefetcher = make_prefetcher(builder, lambda key: sampler.ids(*key), loader, report=report)
        here = self._prefetcher is None or not self._prefetcher.in_processes
        blocks = source.blocks is not None and sampler.window_steps > 0 and here
        self._block_prefetcher = BlockPrefetcher(source, sampler) if blocks and loader.workers == "auto" else None
        self._prefetch_steps = loader.prefetch
        self._together = max(1, min(_MOST_TOGETHER, sampler.window_steps // 8)) if self._block_prefetcher else 1
        self._lanes: Sequence[int] = range(lanes)
        self._submitted_until = dict.fromkeys(self._lanes, 0)

    def set_lanes(self, lanes: Sequence[int], step: int) -> None:
        """From this step on, prefetch for these lanes, in this order."""
        self._lanes = tuple(lanes)
        self._submitted_until = dict.fromkeys(self._lanes, step)
        if self._block_prefetcher:
            self._block_prefetcher.start_at(step)
        if self._prefetcher:
            self._prefetcher.cancel()
            for ahead in range(step, step + self._prefetch_steps + 1, self._together):
                for lane in self._lanes:
                    self._submit(lane, ahead)

    def get(self, step: int, lane: int) -> Batch | None:
        """The batch of a lane; None if the lane has no samples at this step. Requests may come in any order."""
        if self._block_prefetcher:
            self._block_prefetcher.prefetch(step, self._lanes)
        if self._prefetcher:
            self._advance(lane, step)
            batch = self._prefetcher.result((step, lane))
            if batch is not None:
                return batch
        ids = self._sampler.ids(step, lane)
        return self._build((step, lane), ids) if len(ids) else None

    def close(self) -> None:
        for helper in (self._prefetcher, self._block_prefetcher):
            if helper:
                helper.close()

    def _advance(self, lane: int, step: int) -> None:
        """Advance one lane: the caller may request many steps of one lane before the next lane."""
        assert self._prefetcher
        if lane in self._submitted_until and self._submitted_until[lane] <= step + self._prefetch_steps:
            self._prefetcher.cancel(lane, before=step)
            while self._submitted_until[lane] <= step + self._prefetch_steps:
                self._submit(lane, max(step, self._submitted_until[lane]))

    def _submit(self, lane: int, step: int) -> None:
        """Some steps of a lane, which are built together."""
        assert self._prefetcher
        self._submitted_until[lane] = step + self._together
        self._prefetcher.submit([(ahead, lane) for ahead in range(step, step + self._together)])


def evaluation_batches(
    source: DataSource,
    ids: Ids,
    *,
    chunk_size: int,
    chunks: Iterable[int],
    transform: Callable[[Batch], Batch] | None = None,
    loader: LoaderConfig | None = None,
    seed: int = 0,
    report: Report = no_report,
) -> Iterator[tuple[int, Batch]]:
    """The requested chunks with their numbers. Chunk c is ids[c * chunk_size : (c + 1) * chunk_size]."""
    loader = loader or LoaderConfig()
    builder = BatchBuilder(source, seed, EVALUATION, transform)

    def ids_of(key: BatchKey) -> Ids:
        return ids[key[0] * chunk_size : (key[0] + 1) * chunk_size]

    prefetcher = make_prefetcher(builder, ids_of, loader, report=report)
    wanted = (c for c in chunks if c * chunk_size < len(ids))
    if prefetcher is None:
        yield from ((c, builder.build((c,), ids_of((c,)))) for c in wanted)
        return
    with closing(prefetcher):
        submitted: deque[int] = deque()
        for c in wanted:
            prefetcher.submit([(c,)])
            submitted.append(c)
            if len(submitted) > loader.prefetch:
                yield _next_result(prefetcher, submitted)
        while submitted:
            yield _next_result(prefetcher, submitted)


def _next_result(prefetcher: Prefetcher, submitted: deque[int]) -> tuple[int, Batch]:
    c = submitted.popleft()
    batch = prefetcher.result((c,))
    assert batch is not None
    return c, batch
