"""Leaks: what stands on both sides of a split and makes the validation look better than the model is."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import Literal, Protocol

import numpy as np

from shoal.data.digest import Digests, codes, digest_rows
from shoal.data.needs import column
from shoal.data.order import Ids
from shoal.data.source import Source
from shoal.data.split import Parts
from shoal.data.times import as_times
from shoal.spec import data as spec_of

SHOWN = 3


class Side(Protocol):
    """A part that may come from a source of its own."""

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> Source: ...
    @property
    def ids(self) -> Ids: ...


@dataclass(frozen=True)
class Leak:
    """`count` samples of the part `right` have their like in the part `left`; `pairs` are some of them.

    A pair is the number of a sample on the left, and of its like on the right. For times it is the latest
    sample on the left and one on the right that is not later.
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
        return f"{self.count} samples of {self.right} {self.what} {self.left}: {shown}{more}"


def find_leaks(
    parts: Parts, source: Source, spec: spec_of.Split, *, most: int = 10, digests: Digests | None = None
) -> list[Leak]:
    """Identical samples, groups and times on both sides, at most one `Leak` of each kind for two parts.

    `digests` of all samples (`digest_rows`) may be given, so that several folds are read only once.
    """
    sides = {name: np.unique(ids) for name, ids in parts.named().items() if len(ids)}
    if len(sides) < 2:
        return []
    if digests is None:
        digests = _digests_of(sides, source)
    leaks = _shared(sides, digests, "rows", "are identical to samples of", most)
    by = group_column(spec)
    if by is not None:
        groups = codes(column(source, by, field="by"))[1]
        leaks += _shared(sides, groups.view(np.uint64), "group", f"have a '{by}' that is also in", most)
    return leaks + _looks_ahead(sides, source, spec, most)


def group_column(spec: spec_of.Split) -> str | None:
    """The column whose groups the split keeps together."""
    if isinstance(spec, spec_of.GroupedSplit):
        return spec.by
    return spec.group if isinstance(spec, spec_of.HoldoutSplit) else None


def time_column(spec: spec_of.Split) -> str | None:
    """The column by which the split goes forward; 'id' where that is the order of rows."""
    if isinstance(spec, spec_of.TimeSeriesSplit | spec_of.WindowsSplit):
        return spec.by or "id"
    return None


def _digests_of(sides: dict[str, Ids], source: Source) -> Digests:
    ids = np.unique(np.concatenate(list(sides.values())))
    digests = np.zeros(len(source), dtype=np.uint64)
    digests[ids] = digest_rows(source, ids)
    return digests


def _shared(sides: dict[str, Ids], marks: Digests, kind: Literal["rows", "group"], what: str, most: int) -> list[Leak]:
    """A leak for each two parts with a mark in common."""
    leaks = []
    for left, right in combinations(sides, 2):
        count, pairs = _pairs((sides[left], marks[sides[left]]), (sides[right], marks[sides[right]]), most)
        if count:
            leaks.append(Leak(kind, left, right, what, count, pairs))
    return leaks


def _pairs(left: tuple[Ids, Digests], right: tuple[Ids, Digests], most: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """How many on the right have a mark of the left, and some of them with their like."""
    known, first = np.unique(left[1], return_index=True)
    place = np.searchsorted(known, right[1]).clip(max=len(known) - 1)
    like = np.flatnonzero(known[place] == right[1])
    some = like[:most]
    return len(like), tuple(zip(left[0][first[place[some]]].tolist(), right[0][some].tolist(), strict=True))


def find_doubles(left: Side, right: Side, *, most: int = 10) -> list[Leak]:
    """Identical samples in parts of two different sources."""
    marked = [(side.ids, digest_rows(side.source, side.ids)) for side in (left, right)]
    count, pairs = _pairs(marked[0], marked[1], most)
    return [Leak("rows", left.name, right.name, "are identical to samples of", count, pairs)] if count else []


def _looks_ahead(sides: dict[str, Ids], source: Source, spec: spec_of.Split, most: int) -> list[Leak]:
    by = time_column(spec)
    if by is None or not {"train", "validation"} <= sides.keys():
        return []
    times = as_times(column(source, by, field="by"), by)
    train, validation = sides["train"], sides["validation"]
    latest = train[times[train].argmax()]
    early = validation[times[validation] <= times[latest]]
    if not early.size:
        return []
    pairs = tuple((int(latest), int(row)) for row in early[:most])
    what = f"are not later in '{by}' than all of"
    return [Leak("time", "train", "validation", what, len(early), pairs)]
