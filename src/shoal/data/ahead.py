"""How a batch is made, and where: when it is needed, or ahead of that in a thread or in loader processes."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from shoal.data.batch import Batch
from shoal.data.chance import Augment, applied, seeded, single_threaded
from shoal.data.loaders import Key, Loaders, Make
from shoal.data.source import Ids, Source
from shoal.spec.data import Loader
from shoal.spec.seeds import mix

_MOST_AUTO_PROCESSES = 2
_TAKE, _AUGMENT = 0, 1


class Deals(Protocol):
    """What a feed wants of a dealer."""

    window_steps: int

    def ids(self, step: int, lane: int) -> Ids: ...


@dataclass(frozen=True)
class Recipe:
    """From sample ids to a batch. The key (step and lane, or chunk) is the only source of chance.

    Code of the user's runs with one thread wherever it runs: with more, sums could come out in another order.
    """

    source: Source
    seed: int
    purpose: int
    transform: Callable[[Batch], Batch] | None = None
    augment: Augment | None = None

    def make(self, key: Key, ids: Ids) -> Batch:
        batch = self.take(key, ids)
        return self.finish(key, batch) if self.transform or self.augment else batch

    def take(self, key: Key, ids: Ids) -> Batch:
        if not self.source.per_sample:
            return self.source.take(ids)
        with single_threaded(), seeded(mix(self.seed, self.purpose, _TAKE, *key)):
            return self.source.take(ids)

    def finish(self, key: Key, batch: Batch) -> Batch:
        with single_threaded():
            if self.transform is not None:
                batch = applied(self.transform, batch, "transform")
            if self.augment is not None:
                batch = self.augment(batch, mix(self.seed, self.purpose, _AUGMENT, *key))
        return batch


class Ahead:
    """Batches asked for before they are needed. Belongs to the thread that asks.

    `start` runs beside that thread (`workers` of them at once), `finish` in it.
    """

    def __init__(
        self,
        start: Make,
        finish: Callable[[Key, Batch], Batch] | None,
        *,
        workers: int,
        loaders: Loaders | None,
    ) -> None:
        self._start = start
        self._finish = finish
        self._loaders = loaders
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="load")
        self._asked: dict[Key, Future[Batch]] = {}

    def ask(self, key: Key, ids: Ids) -> None:
        self._asked[key] = self._threads.submit(self._start, key, ids)

    def answer(self, key: Key) -> Batch | None:
        """The batch, None if it was not asked for."""
        future = self._asked.pop(key, None)
        if future is None:
            return None
        batch = future.result()
        return batch if self._finish is None else self._finish(key, batch)

    def forget(self, lane: int | None = None, *, before: int = 0) -> None:
        """Drop what is not wanted any more: everything, or of a lane what belongs to steps before this one."""
        for key in [key for key in self._asked if lane is None or (key[0] < before and key[1] == lane)]:
            self._asked.pop(key).cancel()

    def close(self) -> None:
        self.forget()
        if self._loaders:
            self._loaders.close()
        self._threads.shutdown()


class Scout:
    """Looks one window of steps ahead and has the storage blocks that will be needed there decoded, in a thread."""

    STRIDE = 8

    def __init__(self, source: Source, dealer: Deals) -> None:
        self._source = source
        self._dealer = copy.copy(dealer)  # its pages are far from those that training reads
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scout")
        self._looked: Future[None] | None = None
        self._next = 0

    def look(self, step: int, lanes: Sequence[int]) -> None:
        """Called at every step; does something at few of them."""
        if step < self._next or (self._looked and not self._looked.done()):
            return
        self._next = step + self.STRIDE
        self._looked = self._thread.submit(self._warm, step + self._dealer.window_steps, tuple(lanes))

    def _warm(self, step: int, lanes: Sequence[int]) -> None:
        for lane in lanes:
            self._source.warm(self._dealer.ids(step, lane))

    def start_at(self, step: int) -> None:
        self._next = step

    def close(self) -> None:
        self._thread.shutdown()


def open_ahead(recipe: Recipe, loader: Loader) -> Ahead | None:
    """None where batches are best made when they are needed."""
    processes = _processes(recipe.source, loader)
    if processes:
        loaders = Loaders(processes, recipe.make)
        return Ahead(loaders, None, workers=processes, loaders=loaders)
    source = recipe.source
    if loader.workers == "auto" and not source.in_memory and not source.per_sample and source.blocks is None:
        # Reading and decoding let go of Python's lock. The user's functions stay in the asking thread: they
        # may draw from the global generators, and torch's number of threads is the whole process's.
        return Ahead(recipe.take, recipe.finish, workers=1, loaders=None)
    return None


def _processes(source: Source, loader: Loader) -> int:
    if loader.workers != "auto":
        return loader.workers
    spare = len(os.sched_getaffinity(0)) - 1
    return min(_MOST_AUTO_PROCESSES, spare) if source.per_sample else 0
