"""Split samples into train, validation and test: a pure function of spec, data, seed and fold."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from shoal.data.permutation import Ids, Permutation, random_ids
from shoal.data.sample_hash import category_codes
from shoal.data.source import DataSource
from shoal.data.split_columns import (
    WHERE,
    check_class_sizes,
    check_sample_count,
    class_numbers,
    group_numbers,
    split_column,
)
from shoal.data.time_order import Timeline, forward_split
from shoal.errors import error
from shoal.spec import data as spec_of
from shoal.spec.seeds import derive_seed

_STREAM = 0x5917


def _no_ids() -> Ids:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class SplitIds:
    """Sample numbers, sorted. Only a bootstrap's `train` holds a number more than once."""

    train: Ids
    validation: Ids = field(default_factory=_no_ids)
    test: Ids = field(default_factory=_no_ids)

    def by_name(self) -> dict[str, Ids]:
        return {"train": self.train, "validation": self.validation, "test": self.test}


def split(spec: spec_of.SplitConfig, source: DataSource, *, seed: int, fold: int = 0) -> SplitIds:
    """The parts of one fold. `fold` is ignored by splits without folds."""
    n, key = len(source), derive_seed(seed, _STREAM)
    match spec:
        case spec_of.NoSplitConfig():
            return SplitIds(np.arange(n))
        case spec_of.HoldoutSplitConfig():
            return _holdout(spec, source, key=key)
        case spec_of.KFoldSplitConfig():
            return _kfold(spec, n, key=key, fold=fold)
        case spec_of.StratifiedSplitConfig():
            return _stratified(spec, source, key=key, fold=fold)
        case spec_of.GroupedSplitConfig():
            return _grouped(spec, source, fold=fold)
        case spec_of.TimeSeriesSplitConfig():
            return _timeseries(spec, source, fold=fold)
        case spec_of.BootstrapSplitConfig():
            return _bootstrap(spec, n, key=derive_seed(key, fold))
        case spec_of.WindowsSplitConfig():
            return _windows(spec, source, fold=fold)
        case spec_of.ColumnSplitConfig():
            return _by_column(spec, source)


# ---- one cut ----


def _holdout(spec: spec_of.HoldoutSplitConfig, source: DataSource, *, key: int) -> SplitIds:
    if spec.group:
        return _holdout_groups(spec, source, spec.group, key=key)
    n = len(source)
    validation, test = (max(1, round(n * part)) if part else 0 for part in (spec.validation, spec.test))
    if validation + test >= n:
        raise error(
            "SH351",
            f"{n} samples cannot be split: {validation} validation, {test} test, and none is left for training",
            where=WHERE,
            fix="Use more data, or a smaller validation or test part.",
        )
    if spec.stratify:
        label = class_numbers(source, "target" if spec.stratify is True else spec.stratify, field="stratify")
        return _holdout_stratified(label, validation, test, key=key)
    rows = np.arange(n)
    if spec.shuffle:
        rows = Permutation(n, key)(rows)
    train, rest = np.split(rows, [n - validation - test])
    return SplitIds(np.sort(train), np.sort(rest[:validation]), np.sort(rest[validation:]))


def _holdout_stratified(label: Ids, validation: int, test: int, *, key: int) -> SplitIds:
    from sklearn.model_selection import train_test_split

    rest, held_out = np.arange(len(label)), {}
    check_class_sizes(label, 1 + (validation > 0) + (test > 0))
    for name, size in (("test", test), ("validation", validation)):
        if not size:
            continue
        try:
            rest, part = train_test_split(rest, test_size=size, stratify=label[rest], random_state=_sklearn_seed(key))
        except ValueError as failure:
            message = f"the {name} part cannot be stratified: {failure}"
            raise error("SH351", message, where=WHERE, fix="Use more data, or larger parts.") from None
        held_out[name] = np.sort(part)
    return SplitIds(np.sort(rest), **held_out)


def _holdout_groups(spec: spec_of.HoldoutSplitConfig, source: DataSource, by: str, *, key: int) -> SplitIds:
    """Assign whole groups in random order until each part has about its share of the samples."""
    shares = {name: share for name, share in (("test", spec.test), ("validation", spec.validation)) if share}
    group = group_numbers(source, by, field="group", minimum=1 + len(shares))
    sizes = np.bincount(group)
    order = np.arange(len(sizes))[::-1]
    if spec.shuffle:
        order = Permutation(len(sizes), key)(order)
    until = np.cumsum(sizes[order])
    parts, start = {}, 0
    for left, (name, share) in zip(range(len(shares), 0, -1), shares.items(), strict=True):
        goal = share * len(group) + (until[start - 1] if start else 0)
        nearest = int(np.abs(until - goal).argmin()) + 1
        stop = min(max(nearest, start + 1), len(sizes) - left)
        parts[name] = _members(group, order[start:stop])
        start = stop
    return SplitIds(_members(group, order[start:]), **parts)


def _members(group: Ids, chosen: Ids) -> Ids:
    return np.flatnonzero(np.isin(group, chosen))


def _by_column(spec: spec_of.ColumnSplitConfig, source: DataSource) -> SplitIds:
    kinds, numbers = category_codes(split_column(source, spec.by, field="by"))
    lists = {"train": spec.train, "validation": spec.validation, "test": spec.test, "": spec.ignore}
    part_of = [_split_of(_decode_bytes(kind), lists) for kind in kinds]
    unknown = [kind for kind, part in zip(kinds, part_of, strict=True) if part is None]
    if unknown:
        raise error(
            "SH354",
            f"column '{spec.by}' has the value {unknown[0]!r}, which is neither train, validation nor test",
            where=f"{WHERE}.by",
            fix="Name the value in split.train, validation, test or ignore.",
        )
    names = np.array(part_of, dtype=object)[numbers]
    parts = SplitIds(*(np.flatnonzero(names == name) for name in ("train", "validation", "test")))
    if not len(parts.train):
        raise error("SH354", f"column '{spec.by}' names no row for training", where=f"{WHERE}.by",
                    fix=f"Name in split.train a value that the column has: {kinds[:10]}.")  # fmt: skip
    return parts


def _split_of(kind: Any, lists: dict[str, list[Any]]) -> str | None:
    return next((name for name, values in lists.items() if kind in values), None)


def _decode_bytes(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


# ---- folds ----


def _kfold(spec: spec_of.KFoldSplitConfig, n: int, *, key: int, fold: int) -> SplitIds:
    from sklearn.model_selection import KFold

    check_sample_count(n, spec.folds)
    folds = KFold(spec.folds, shuffle=spec.shuffle, random_state=_sklearn_seed(key) if spec.shuffle else None)
    return _select_fold(folds.split(np.empty(n)), fold)


def _stratified(spec: spec_of.StratifiedSplitConfig, source: DataSource, *, key: int, fold: int) -> SplitIds:
    from sklearn.model_selection import StratifiedKFold

    check_sample_count(len(source), spec.folds)
    label = class_numbers(source, spec.by or "target", field="by")
    check_class_sizes(label, spec.folds)
    folds = StratifiedKFold(spec.folds, shuffle=True, random_state=_sklearn_seed(key))
    return _select_fold(folds.split(label, label), fold)


def _grouped(spec: spec_of.GroupedSplitConfig, source: DataSource, *, fold: int) -> SplitIds:
    from sklearn.model_selection import GroupKFold

    group = group_numbers(source, spec.by, field="by", minimum=spec.folds)
    return _select_fold(GroupKFold(spec.folds).split(group, groups=group), fold)


def _bootstrap(spec: spec_of.BootstrapSplitConfig, n: int, *, key: int) -> SplitIds:
    check_sample_count(n, 2)
    size = max(1, round(spec.size * n))
    draws = (np.sort(random_ids(n, size, key=derive_seed(key, attempt))) for attempt in count())
    # A small set may be drawn completely, which leaves no sample for validation: draw again.
    train = next(drawn for drawn in draws if len(np.unique(drawn)) < n)
    return SplitIds(train, np.setdiff1d(np.arange(n), train))


def _select_fold(folds: Any, fold: int) -> SplitIds:
    train, validation = next(pair for number, pair in enumerate(folds) if number == fold)
    return SplitIds(np.asarray(train, dtype=np.int64), np.asarray(validation, dtype=np.int64))


# ---- folds that go forward in time ----


def _timeseries(spec: spec_of.TimeSeriesSplitConfig, source: DataSource, *, fold: int) -> SplitIds:
    n, length = len(source), len(source) // (spec.folds + 1)
    if length == 0 or n - spec.folds * length - spec.gap <= 0:
        raise error("SH351", f"{n} samples are too few for {spec.folds} folds with a gap of {spec.gap}",
                    where=WHERE, fix="Use fewer folds, a smaller gap or more data.")  # fmt: skip
    boundary = n - (spec.folds - fold) * length
    max_train = None if spec.window == "expanding" else spec.size or length
    line = _timeline(source, spec.by)
    return SplitIds(*forward_split(line, 0, boundary, boundary + length, gap=spec.gap, max_train=max_train))


def _windows(spec: spec_of.WindowsSplitConfig, source: DataSource, *, fold: int) -> SplitIds:
    n, stride = len(source), 1 - spec.overlap
    length = n / (1 + (spec.folds - 1) * stride)
    start = round(fold * stride * length)
    stop = n if fold == spec.folds - 1 else min(n, round(start + length))
    boundary = stop - max(1, round((stop - start) * spec.validation))
    if boundary - spec.gap <= start:
        raise error("SH351", f"{n} samples are too few for {spec.folds} windows with a gap of {spec.gap}",
                    where=WHERE, fix="Use fewer folds, a smaller gap or more data.")  # fmt: skip
    return SplitIds(*forward_split(_timeline(source, spec.by), start, boundary, stop, gap=spec.gap))


def _timeline(source: DataSource, by: str | None) -> Timeline:
    if by is None:
        return Timeline.of_rows(len(source))
    return Timeline.of_column(split_column(source, by, field="by"), by)


def _sklearn_seed(key: int) -> int:
    """A seed in the range that scikit-learn accepts."""
    return key & 0xFFFFFFFF
