"""Samplers: the samples of each lane at each step, as a pure function of step and lane. No worker keeps state for it.

Every sample occurs exactly once per epoch, unless samples are drawn by weight.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.number_column import named_column, number_of_each_sample
from shoal.data.permutation import BlockShuffle, Ids, IndexOrder, Permutation, block_edges, random_words
from shoal.data.sample_hash import Hashes, category_codes, hash_values
from shoal.data.source import DataSource
from shoal.errors import error
from shoal.spec.data import (
    BalancedSamplerConfig,
    HashSamplerConfig,
    SamplerConfig,
    ShuffledSamplerConfig,
    WeightedSamplerConfig,
)
from shoal.spec.seeds import derive_seed

PAGE_SAMPLES = 1 << 16
MAX_STEPS_PER_PAGE = 512
_STREAM = 0xDEA1
_WHERE = "data.sampler"


class EpochShuffle:
    """The order of the given samples in each epoch."""

    def __init__(
        self, ids: Ids, *, spec: ShuffledSamplerConfig, blocks: Ids | None, key: int, is_sequential: bool = False
    ) -> None:
        in_blocks = spec.shuffle and blocks is not None
        self._ids = np.sort(ids) if in_blocks else ids
        self._edges = block_edges(self._ids, blocks) if in_blocks and blocks is not None else None
        self._spec = spec
        self._key = key
        self._open_blocks = 1 if is_sequential else spec.open_blocks
        self._is_sequential = is_sequential
        blocks_used = len(self._edges) - 1 if self._edges is not None else 0
        self.window_samples = len(ids) * self._open_blocks // blocks_used if blocks_used else 0
        """About how many samples are shuffled together if storage has blocks; 0 if all samples are."""

    def __len__(self) -> int:
        return len(self._ids)

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """The samples at positions start..stop-1 of an epoch."""
        if not self._spec.shuffle:
            return self._ids[start:stop]
        return self._ids[self._permutation(epoch)(np.arange(start, min(stop, len(self._ids))))]

    def _permutation(self, epoch: int) -> IndexOrder:
        key = derive_seed(self._key, epoch)
        if self._edges is not None:
            return BlockShuffle(self._edges, open_blocks=self._open_blocks, key=key, in_order=self._is_sequential)
        return Permutation(len(self._ids), key)


class WeightedDraws:
    """The samples of each epoch, drawn with replacement: each draw is a pure function of epoch and position."""

    window_samples = 0

    def __init__(self, ids: Ids, weights: NDArray[np.float64], *, key: int) -> None:
        self._ids, self._key = ids, key
        self._until = np.cumsum(weights)
        self._last = int(np.flatnonzero(weights)[-1])

    def __len__(self) -> int:
        return len(self._ids)

    def ids(self, epoch: int, start: int, stop: int) -> Ids:
        """The samples at positions start..stop-1 of an epoch."""
        words = random_words(stop - start, key=derive_seed(self._key, epoch), first=start)
        drawn = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53 * self._until[-1]
        found: Ids = self._ids[np.minimum(np.searchsorted(self._until, drawn, side="right"), self._last)]
        return found


class LaneSampler(ABC):
    """Gives every sample exactly once per epoch, in batches of `batch_size`, each divided among the lanes.

    Steps count from 0 over the whole run. Any thread may ask for any step at any time. Consecutive steps are cheap,
    because some hundred steps (a page) are computed together and kept.
    """

    def __init__(self, n: int, *, lanes: int, batch_size: int, drop_last: bool) -> None:
        self.lanes = lanes
        self.batch_size = batch_size
        self.samples_per_epoch = n - n % batch_size if drop_last else n
        self.steps_per_epoch = -(-self.samples_per_epoch // batch_size)
        self._steps_per_page = max(1, min(PAGE_SAMPLES // batch_size, MAX_STEPS_PER_PAGE))
        self._pages: dict[tuple[int, int], list[NDArray[Any]]] = {}
        self.window_steps = 0
        """Number of steps whose samples come from the same few storage blocks; 0 without blocks."""

    def ids(self, step: int, lane: int) -> Ids:
        """The samples of a lane at a step. The array belongs to the caller."""
        epoch, step = divmod(step, self.steps_per_epoch)
        number, row = divmod(step, self._steps_per_page)
        page = self._pages.get((epoch, number))
        if page is None:
            page = self._load_page(epoch, number)
        return self._lane_ids(page, row, lane)

    def batch_samples(self, step: int) -> int:
        """Number of samples of all lanes at a step."""
        start = step % self.steps_per_epoch * self.batch_size
        return min(self.batch_size, self.samples_per_epoch - start)

    def samples_before(self, step: int) -> int:
        """Number of samples of all steps before this one."""
        epochs, steps = divmod(step, self.steps_per_epoch)
        return epochs * self.samples_per_epoch + steps * self.batch_size

    def _load_page(self, epoch: int, number: int) -> list[NDArray[Any]]:
        start = number * self._steps_per_page
        page = self._compute_page(epoch, start, min(start + self._steps_per_page, self.steps_per_epoch))
        # One assignment, so no thread sees a partial change. The previous page stays for threads that are behind.
        self._pages = {**dict(list(self._pages.items())[-1:]), (epoch, number): page}
        return page

    @abstractmethod
    def _compute_page(self, epoch: int, first: int, last: int) -> list[NDArray[Any]]:
        """The arrays that `_lane_ids` needs for the steps first..last-1 of an epoch."""

    @abstractmethod
    def _lane_ids(self, page: list[NDArray[Any]], row: int, lane: int) -> Ids:
        """The samples of a lane at a step of the page."""


class RandomLaneSampler(LaneSampler):
    """Each batch is divided into contiguous ranges. If it does not divide evenly, the first lanes get one sample
    more."""

    def __init__(self, shuffle: EpochShuffle | WeightedDraws, *, lanes: int, batch_size: int, drop_last: bool) -> None:
        super().__init__(len(shuffle), lanes=lanes, batch_size=batch_size, drop_last=drop_last)
        self._shuffle = shuffle
        self.window_steps = -(-shuffle.window_samples // batch_size)

    def _compute_page(self, epoch: int, first: int, last: int) -> list[NDArray[Any]]:
        return [self._batches(epoch, first, last)]

    def _batches(self, epoch: int, first: int, last: int) -> Ids:
        stop = min(last * self.batch_size, self.samples_per_epoch)
        return self._shuffle.ids(epoch, first * self.batch_size, stop)

    def _lane_ids(self, page: list[NDArray[Any]], row: int, lane: int) -> Ids:
        start = row * self.batch_size
        size = min(self.batch_size, len(page[0]) - start)
        share, extra = divmod(size, self.lanes)
        start += lane * share + min(lane, extra)
        return page[0][start : start + share + (lane < extra)].copy()


class BalancedLaneSampler(RandomLaneSampler):
    """Each batch is divided so that all lanes have about the same cost.

    The costliest remaining sample goes to the lane with the lowest cost (Graham's LPT: at most 4/3 of the optimum).
    """

    def __init__(self, shuffle: EpochShuffle, *, costs: NDArray[np.float64], lanes: int, batch_size: int,
                 drop_last: bool) -> None:  # fmt: skip
        super().__init__(shuffle, lanes=lanes, batch_size=batch_size, drop_last=drop_last)
        # A sample with cost 0 gets a small cost: otherwise all such samples would go to one lane.
        self._costs = np.maximum(costs, costs.max() * 2.0**-20 or 1.0)

    def _compute_page(self, epoch: int, first: int, last: int) -> list[NDArray[Any]]:
        ids = self._batches(epoch, first, last)
        costs = np.full((last - first) * self.batch_size, -1.0)
        costs[: len(ids)] = self._costs[ids]
        lanes = assign_longest_first(costs.reshape(last - first, self.batch_size), self.lanes).reshape(-1)
        return [ids, lanes[: len(ids)]]

    def _lane_ids(self, page: list[NDArray[Any]], row: int, lane: int) -> Ids:
        here = slice(row * self.batch_size, (row + 1) * self.batch_size)
        batch: Ids = page[0][here]
        mine: Ids = batch[page[1][here] == lane]
        return mine


def assign_longest_first(costs: NDArray[np.float64], lanes: int) -> NDArray[np.intp]:
    """The lane of each cost, row by row. Ties go to the first sample and the lowest lane.

    Costs below zero are padding: they come last, so their lanes do not affect the others.
    """
    rows = np.arange(len(costs))
    order = np.argsort(-costs, axis=1, kind="stable")
    loads = np.zeros((len(costs), lanes))
    out = np.empty(costs.shape, dtype=np.intp)
    for column in order.T:
        lane = loads.argmin(axis=1)
        loads[rows, lane] += costs[rows, column]
        out[rows, column] = lane
    return out


class HashLaneSampler(LaneSampler):
    """Each lane has its own samples, and each batch has a proportional share of every lane's samples.

    The lanes' samples are merged so that any prefix of the merged order holds about the same fraction of every lane
    (sample j of n is at (j + 1/2) / n). Batches are consecutive ranges of the merged order.
    """

    def __init__(self, shuffles: list[EpochShuffle], *, batch_size: int, drop_last: bool) -> None:
        sizes = [len(shuffle) for shuffle in shuffles]
        super().__init__(sum(sizes), lanes=len(shuffles), batch_size=batch_size, drop_last=drop_last)
        self._shuffles = shuffles
        self._offsets = self._lane_offsets(sizes)

    def _lane_offsets(self, sizes: list[int]) -> Ids:
        """Number of samples of each lane before each step, in steps + 1 rows."""
        places = np.concatenate([(np.arange(size) + 0.5) / max(size, 1) for size in sizes])
        lane = np.repeat(np.arange(self.lanes), sizes)[np.argsort(places, kind="stable")]
        lane = lane[: self.samples_per_epoch]
        cell = np.arange(len(lane)) // self.batch_size * self.lanes + lane
        counts = np.bincount(cell, minlength=self.steps_per_epoch * self.lanes)
        offsets = np.zeros((self.steps_per_epoch + 1, self.lanes), dtype=np.int64)
        np.cumsum(counts.reshape(-1, self.lanes), axis=0, out=offsets[1:])
        return offsets

    def _compute_page(self, epoch: int, first: int, last: int) -> list[NDArray[Any]]:
        spans = zip(self._shuffles, self._offsets[first], self._offsets[last], strict=True)
        samples = [shuffle.ids(epoch, int(start), int(stop)) for shuffle, start, stop in spans]
        return [self._offsets[first : last + 1] - self._offsets[first], *samples]

    def _lane_ids(self, page: list[NDArray[Any]], row: int, lane: int) -> Ids:
        offsets = page[0]
        return page[lane + 1][offsets[row, lane] : offsets[row + 1, lane]].copy()


def jump_hash(keys: Hashes, lanes: int) -> NDArray[np.int64]:
    """The lane of each key, by jump consistent hashing (Lamping and Veach).

    When lane n is added, it takes 1/n of the keys of each other lane, and no other key moves.
    """
    state = keys.copy()
    lane = np.zeros(len(keys), dtype=np.int64)
    there = np.zeros(len(keys), dtype=np.int64)
    moving = np.arange(len(keys))
    while moving.size:
        lane[moving] = there[moving]
        state[moving] = state[moving] * np.uint64(2862933555777941757) + np.uint64(1)
        roll = ((state[moving] >> np.uint64(33)) + np.uint64(1)).astype(np.float64)
        there[moving] = ((lane[moving] + 1) * (2.0**31 / roll)).astype(np.int64)
        moving = moving[there[moving] < lanes]
    return lane


def make_sampler(
    spec: SamplerConfig,
    *,
    ids: Ids,
    lanes: int,
    batch_size: int,
    seed: int,
    source: DataSource,
    drop_last: bool = False,
) -> LaneSampler:
    """The sampler of these samples of a source. A path in `spec.by` is absolute or relative to the working
    directory."""
    _check_sizes(len(ids), batch_size, drop_last)
    key = derive_seed(seed, _STREAM)
    storage: dict[str, Any] = {"blocks": source.blocks, "is_sequential": source.is_sequential}
    if isinstance(spec, HashSamplerConfig):
        lane = jump_hash(_hash_keys(spec, ids, source), lanes)
        shuffles = [EpochShuffle(ids[lane == i], spec=spec, key=derive_seed(key, i), **storage) for i in range(lanes)]
        return HashLaneSampler(shuffles, batch_size=batch_size, drop_last=drop_last)
    if isinstance(spec, WeightedSamplerConfig):
        if source.is_sequential:
            fix = "Use the random sampler, or a Dataset with __getitem__."
            raise error("SH355", "samples of a stream cannot be drawn in any order", where=_WHERE, fix=fix)
        draws = WeightedDraws(ids, _weights(spec, ids, source), key=key)
        return RandomLaneSampler(draws, lanes=lanes, batch_size=batch_size, drop_last=drop_last)
    shuffle = EpochShuffle(ids, spec=spec, key=key, **storage)
    if isinstance(spec, BalancedSamplerConfig):
        costs = _costs(spec.by, source, what="cost")
        return BalancedLaneSampler(shuffle, costs=costs, lanes=lanes, batch_size=batch_size, drop_last=drop_last)
    return RandomLaneSampler(shuffle, lanes=lanes, batch_size=batch_size, drop_last=drop_last)


def _check_sizes(n: int, batch_size: int, drop_last: bool) -> None:
    if n == 0:
        raise error("SH355", "there are no training samples", where=_WHERE, fix="Give training samples.")
    if drop_last and n < batch_size:
        raise error(
            "SH355",
            f"drop_last leaves no step: {n} samples are less than one batch of {batch_size}",
            where="drop_last",
            fix=f"Set batch_size to at most {n}, or drop_last: false.",
        )


def _hash_keys(spec: HashSamplerConfig, ids: Ids, source: DataSource) -> Hashes:
    return hash_values(ids if spec.by is None else _column(spec.by, source)[ids])


def _weights(spec: WeightedSamplerConfig, ids: Ids, source: DataSource) -> NDArray[np.float64]:
    """The weight of each of these samples."""
    if spec.by is not None:
        weights = _costs(spec.by, source, what="weight")[ids]
    else:
        values = _column(spec.balance, source, field="balance")[ids]
        if values.ndim > 1 or (values.dtype.kind == "f" and (values != np.round(values)).any()):
            message = f"'{spec.balance}' has no classes to balance"
            raise error("SH355", message, where=f"{_WHERE}.balance", fix="Name a column with classes, or write `by`.")
        classes = category_codes(values)[1]
        weights = 1.0 / np.bincount(classes)[classes]
    if not weights.sum() > 0:
        raise error("SH355", "all weights are 0", where=f"{_WHERE}.by", fix="Give some sample a weight above 0.")
    return weights


def _costs(by: str, source: DataSource, *, what: str) -> NDArray[np.float64]:
    return number_of_each_sample(by, source, what=what, where=f"{_WHERE}.by", codes=("SH355", "SH356"))


def _column(name: str, source: DataSource, *, field: str = "by") -> NDArray[Any]:
    return named_column(name, source, where=f"{_WHERE}.{field}", code="SH356")
