"""Build batches on demand, or ahead of time in a thread or in loader processes."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from shoal.data.augment_rng import Augment, apply_user_function, seeded_rng, single_threaded
from shoal.data.batch import Batch
from shoal.data.loader_processes import BatchKey, LoaderDeath, LoaderPool
from shoal.data.source import DataSource, Ids, format_ids
from shoal.errors import ShoalError, error
from shoal.spec.data import LoaderConfig
from shoal.spec.seeds import derive_seed

IdsOf = Callable[[BatchKey], Ids]
_MAX_AUTO_PROCESSES = 2
_LOAD, _AUGMENT = 0, 1


class Sampler(Protocol):
    """The interface of samplers that the batch loader uses."""

    window_steps: int

    def ids(self, step: int, lane: int) -> Ids: ...


@dataclass(frozen=True)
class BatchBuilder:
    """Builds a batch from sample ids. The key (step and lane, or chunk) is the only source of randomness.

    The user's code always runs with one torch thread: with more, sums could be added in another order.
    """

    source: DataSource
    seed: int
    purpose: int
    transform: Callable[[Batch], Batch] | None = None
    augment: Augment | None = None

    def build(self, key: BatchKey, ids: Ids) -> Batch:
        batch = self.load(key, ids)
        return self.apply_transforms(key, batch) if self.transforms else batch

    @property
    def transforms(self) -> bool:
        """Whether the user's functions change batches."""
        return self.transform is not None or self.augment is not None

    def load(self, key: BatchKey, ids: Ids) -> Batch:
        if not self.source.per_sample:
            return self.source.take(ids)
        with single_threaded(), seeded_rng(derive_seed(self.seed, self.purpose, _LOAD, *key)):
            return self.source.take(ids)

    def load_each(self, parts: Mapping[BatchKey, Ids]) -> dict[BatchKey, Batch]:
        """Batches of a source that needs no generators, without transforms."""
        return dict(zip(parts, self.source.take_each(list(parts.values())), strict=True)) if parts else {}

    def apply_transforms(self, key: BatchKey, batch: Batch) -> Batch:
        with single_threaded():
            if self.transform is not None:
                batch = apply_user_function(self.transform, batch, "transform")
            if self.augment is not None:
                batch = self.augment(batch, derive_seed(self.seed, self.purpose, _AUGMENT, *key))
        return batch


MAX_LOADER_DEATHS = 3
"""How many loader processes may die while they build the same batch."""


class Report(Protocol):
    """Receives events, on the thread that requests batches."""

    def __call__(self, kind: str, /, **fields: Any) -> object: ...


def no_report(kind: str, /, **fields: Any) -> None:
    """Discard the event."""


@dataclass
class _Request:
    """A batch that is being built, alone or together with others."""

    future: Future[dict[BatchKey, Batch]]
    deaths: int = 0

    def loader_death(self) -> LoaderDeath | None:
        failure = self.future.exception() if self.future.done() else None
        return failure if isinstance(failure, LoaderDeath) else None


class Prefetcher:
    """Batches that are requested before they are needed. Belongs to the thread that requests them.

    `ids_of` and `load`, which builds some batches together, run in side threads (`workers` calls at once), `finish` in
    the requesting thread. A loader process that dies is started again, and the batches that it owed are built again.
    """

    def __init__(
        self,
        load: Callable[[Mapping[BatchKey, Ids]], dict[BatchKey, Batch]],
        finish: Callable[[BatchKey, Batch], Batch] | None,
        *,
        ids_of: IdsOf,
        workers: int,
        loader_pool: LoaderPool | None,
        report: Report = no_report,
    ) -> None:
        self._load = load
        self._finish = finish
        self._ids_of = ids_of
        self._loader_pool = loader_pool
        self._report = report
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="load")
        self._pending: dict[BatchKey, _Request] = {}

    @property
    def in_processes(self) -> bool:
        return self._loader_pool is not None

    def submit(self, keys: Sequence[BatchKey]) -> None:
        """Have these batches built together."""
        future = self._threads.submit(self._build, keys)
        self._pending.update({key: _Request(future) for key in keys})

    def _build(self, keys: Sequence[BatchKey]) -> dict[BatchKey, Batch]:
        parts = ((key, self._ids_of(key)) for key in keys)
        return self._load({key: ids for key, ids in parts if len(ids)})

    def result(self, key: BatchKey) -> Batch | None:
        """The batch; None if it was not submitted or has no samples. SH312 if every loader process dies of it."""
        request = self._pending.pop(key, None)
        if request is None:
            return None
        while True:
            try:
                batch = request.future.result().get(key)
            except LoaderDeath:
                self._replace_dead_loaders(key, request)
            else:
                return batch if self._finish is None or batch is None else self._finish(key, batch)

    def _replace_dead_loaders(self, key: BatchKey, request: _Request) -> None:
        """Start the dead processes again, and request every batch again that failed with them."""
        assert self._loader_pool
        self._loader_pool.restart()
        for owed_key, owed in [(key, request), *self._pending.items()]:
            death = owed.loader_death()
            if death is None:
                continue
            if death.how:
                owed.deaths += 1
                ids = self._ids_of(owed_key)
                if owed.deaths == MAX_LOADER_DEATHS:
                    raise self._deaths_error(owed_key, ids, death.how)
                self._report("loader_restarted", samples=[int(i) for i in ids[:8]], reason=f"died {death.how}")
            owed.future = self._threads.submit(self._build, [owed_key])

    def _deaths_error(self, key: BatchKey, ids: Ids, how: str) -> ShoalError:
        assert self._loader_pool
        self.cancel()
        killer = self._loader_pool.find_killer(key, ids)
        which = f"sample {killer}" if killer is not None else f"samples {format_ids(ids)} together"
        message = f"{which}: {MAX_LOADER_DEATHS} loader processes died while they built it, the last one {how}"
        return error("SH312", message)

    def cancel(self, lane: int | None = None, *, before: int = 0) -> None:
        """Drop batches that are no longer needed: all, or those of `lane` for steps before `before`."""
        dropped = [key for key in self._pending if lane is None or (key[0] < before and key[1] == lane)]
        futures = {self._pending.pop(key).future for key in dropped}
        for future in futures - {request.future for request in self._pending.values()}:
            future.cancel()

    def close(self) -> None:
        self.cancel()
        if self._loader_pool:
            self._loader_pool.close()
        self._threads.shutdown()


class BlockPrefetcher:
    """Decodes, in a thread, the storage blocks that the next window of steps needs."""

    STRIDE = 8

    def __init__(self, source: DataSource, sampler: Sampler) -> None:
        self._source = source
        self._sampler = copy.copy(sampler)  # a copy, because it reads other pages than training does
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scout")
        self._in_flight: Future[None] | None = None
        self._next_step = 0

    def prefetch(self, step: int, lanes: Sequence[int]) -> None:
        """Call at every step. Most calls do nothing."""
        if step < self._next_step or (self._in_flight and not self._in_flight.done()):
            return
        self._next_step = step + self.STRIDE
        self._in_flight = self._thread.submit(self._warm, step + self._sampler.window_steps, tuple(lanes))

    def _warm(self, step: int, lanes: Sequence[int]) -> None:
        for lane in lanes:
            self._source.warm(self._sampler.ids(step, lane))

    def start_at(self, step: int) -> None:
        self._next_step = step

    def close(self) -> None:
        self._thread.shutdown()


def make_prefetcher(
    builder: BatchBuilder, ids_of: IdsOf, loader: LoaderConfig, *, report: Report = no_report
) -> Prefetcher | None:
    """None if building batches on demand is fastest."""
    processes = _process_count(builder.source, loader)
    if processes:
        pool = LoaderPool(processes, builder.build)

        def load(parts: Mapping[BatchKey, Ids]) -> dict[BatchKey, Batch]:
            return {key: pool(key, ids) for key, ids in parts.items()}

        return Prefetcher(load, None, ids_of=ids_of, workers=processes, loader_pool=pool, report=report)
    source = builder.source
    if loader.workers == "auto" and not source.in_memory and not source.per_sample and _is_worth_a_thread(source):
        # Reading and decoding release the GIL. The user's functions stay in the requesting thread: they may use the
        # global generators, and torch's number of threads is a setting of the process.
        finish = builder.apply_transforms if builder.transforms else None
        return Prefetcher(builder.load_each, finish, ids_of=ids_of, workers=1, loader_pool=None)
    return None


def _process_count(source: DataSource, loader: LoaderConfig) -> int:
    if loader.workers != "auto":
        return loader.workers
    most = 1 if source.is_sequential else _MAX_AUTO_PROCESSES  # each process reads a stream from its beginning
    return min(most, _spare_cores()) if source.per_sample else 0


def _is_worth_a_thread(source: DataSource) -> bool:
    """Blocks are decoded before they are needed, and then only have to be copied: not worth sharing a core for."""
    return source.blocks is None or _spare_cores() > 0


def _spare_cores() -> int:
    return len(os.sched_getaffinity(0)) - 1
