"""Leaks: data on both sides of a split, which makes validation results look better than the model is."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.data.permutation import Ids
from shoal.data.sample_hash import Hashes, category_codes, hash_samples
from shoal.data.source import DataSource
from shoal.data.split import SplitIds
from shoal.data.split_columns import split_column
from shoal.data.time_order import parse_times
from shoal.errors import plural
from shoal.spec import data as spec_of

SHOWN = 3


class SplitLike(Protocol):
    """A part of the data that may have its own source."""

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> DataSource: ...
    @property
    def ids(self) -> Ids: ...


@dataclass(frozen=True)
class Leak:
    """`count` samples of the part `right` match samples of the part `left`; `pairs` are examples.

    A pair is the id of a sample on the left and of its match on the right. For times it is the latest sample on the
    left and a sample on the right that is not later.
    """

    kind: Literal["rows", "group", "time"]
    left: str
    right: str
    what: str
    count: int
    pairs: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        shown = ", ".join(f"{right} (like {left})" for left, right in self.pairs[:SHOWN])
        more = ", …" if self.count > SHOWN else ""
        return f"{self.summary}: {shown}{more}"

    @property
    def summary(self) -> str:
        """The leak without examples."""
        verb, rest = self.what.split(" ", 1)
        verb = {"are": "is", "have": "has"}.get(verb, verb) if self.count == 1 else verb
        return f"{plural(self.count, 'sample')} of {self.right} {verb} {rest} {self.left}"


def find_leaks(
    split_ids: SplitIds,
    source: DataSource,
    spec: spec_of.SplitConfig,
    *,
    max_pairs: int = 10,
    hashes: Hashes | None = None,
) -> list[Leak]:
    """Samples, groups and times that are on both sides: at most one `Leak` of each kind for two parts.

    `hashes` of all samples (`hash_samples`) may be given, so that the data is read once for several folds.
    """
    sides = sides_of(split_ids)
    if len(sides) < 2:
        return []
    if hashes is None:
        hashes = _hash_sides(sides, source)
    leaks = find_shared(sides, hashes, "rows", "are identical to samples of", max_pairs)
    if by := group_column(spec):
        groups = category_codes(split_column(source, by, field="by"))[1]
        leaks += find_shared(sides, groups.view(np.uint64), "group", f"have a '{by}' that is also in", max_pairs)
    times = times_of(source, spec)
    if times is not None:
        leaks += find_lookahead(sides, times, time_column(spec) or "row order", max_pairs)
    return leaks


def sides_of(split_ids: SplitIds) -> dict[str, Ids]:
    """The parts that have samples, each sample once."""
    return {name: np.unique(ids) for name, ids in split_ids.by_name().items() if len(ids)}


def group_column(spec: spec_of.SplitConfig) -> str | None:
    """The column whose groups the split keeps together."""
    if isinstance(spec, spec_of.GroupedSplitConfig):
        return spec.by
    return spec.group if isinstance(spec, spec_of.HoldoutSplitConfig) else None


def time_column(spec: spec_of.SplitConfig) -> str | None:
    """The time column that the split names."""
    return spec.by if isinstance(spec, spec_of.TimeSeriesSplitConfig | spec_of.WindowsSplitConfig) else None


def times_of(source: DataSource, spec: spec_of.SplitConfig) -> NDArray[Any] | None:
    """The time of each sample by which the split goes forward: of its column, or the order of rows. None for other
    splits."""
    if not isinstance(spec, spec_of.TimeSeriesSplitConfig | spec_of.WindowsSplitConfig):
        return None
    if spec.by is None:
        return np.arange(len(source))
    return parse_times(split_column(source, spec.by, field="by"), spec.by)


def _hash_sides(sides: dict[str, Ids], source: DataSource) -> Hashes:
    ids = np.unique(np.concatenate(list(sides.values())))
    digests = np.zeros(len(source), dtype=np.uint64)
    digests[ids] = hash_samples(source, ids)
    return digests


def find_shared(
    sides: dict[str, Ids], keys: Hashes, kind: Literal["rows", "group"], what: str, max_pairs: int = 0
) -> list[Leak]:
    """A leak for each pair of parts that share a key."""
    leaks = []
    for left, right in combinations(sides, 2):
        count, pairs = _match_pairs((sides[left], keys[sides[left]]), (sides[right], keys[sides[right]]), max_pairs)
        if count:
            leaks.append(Leak(kind, left, right, what, count, pairs))
    return leaks


def _match_pairs(
    left: tuple[Ids, Hashes], right: tuple[Ids, Hashes], max_pairs: int
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """How many samples on the right share a key with the left, and example pairs."""
    known, first = np.unique(left[1], return_index=True)
    place = np.searchsorted(known, right[1]).clip(max=len(known) - 1)
    like = np.flatnonzero(known[place] == right[1])
    some = like[:max_pairs]
    return len(like), tuple(zip(left[0][first[place[some]]].tolist(), right[0][some].tolist(), strict=True))


def find_duplicates(left: SplitLike, right: SplitLike, *, max_pairs: int = 10) -> list[Leak]:
    """Identical samples in parts of two different sources."""
    marked = [(side.ids, hash_samples(side.source, side.ids)) for side in (left, right)]
    count, pairs = _match_pairs(marked[0], marked[1], max_pairs)
    return [Leak("rows", left.name, right.name, "are identical to samples of", count, pairs)] if count else []


def find_lookahead(sides: dict[str, Ids], times: NDArray[Any], by: str, max_pairs: int = 0) -> list[Leak]:
    """A leak for each held-out part with samples that are not later than all of train; `times`: one per sample."""
    train = sides.get("train")
    if train is None:
        return []
    leaks = []
    latest = train[times[train].argmax()]
    for name, held_out in sides.items():
        early = held_out[times[held_out] <= times[latest]] if name != "train" else held_out[:0]
        if early.size:
            pairs = tuple((int(latest), int(row)) for row in early[:max_pairs])
            leaks.append(Leak("time", "train", name, f"are not later in '{by}' than all of", len(early), pairs))
    return leaks
