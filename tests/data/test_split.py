"""Every kind of split: nothing is on both sides, balance is kept, time goes forward, and the seed decides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from shoal.data.split import split
from shoal.errors import DataError
from shoal.spec.data import SplitConfig

from .memory_source import MemorySource

seeds = st.integers(0, 2**63)


def spec_of(kind, **fields):
    return TypeAdapter(SplitConfig).validate_python({"kind": kind, **fields})


def make(kind, source, *, seed=0, fold=0, **fields):
    return split(spec_of(kind, **fields), source, seed=seed, fold=fold)


def tiles(parts, n):
    """The parts are sorted and together have every sample once."""
    named = parts.by_name().values()
    assert all(ids.dtype == np.int64 and (np.diff(ids) > 0).all() for ids in named)
    return np.array_equal(np.sort(np.concatenate(list(named))), np.arange(n))


def refused(code, kind, source, **fields):
    with pytest.raises(DataError) as caught:
        make(kind, source, **fields)
    assert caught.value.code == code, caught.value
    return str(caught.value)


EVERY = [
    {"kind": "none"},
    {"kind": "holdout", "test": 0.2},
    {"kind": "holdout", "shuffle": False},
    {"kind": "holdout", "stratify": True, "test": 0.1},
    {"kind": "holdout", "group": "g"},
    {"kind": "kfold"},
    {"kind": "stratified"},
    {"kind": "grouped", "by": "g"},
    {"kind": "timeseries", "by": "t", "window": "sliding"},
    {"kind": "bootstrap"},
    {"kind": "windows", "by": "t"},
    {"kind": "column", "by": "p"},
]


def everything(n=120):
    numbers = np.arange(n)
    return MemorySource(n, target=numbers % 3, g=numbers % 11, t=numbers[::-1] // 2,
                 p=np.where(numbers % 4, "train", "val").astype(object))  # fmt: skip


@pytest.mark.parametrize("fields", EVERY, ids=lambda fields: "-".join(map(str, fields.values())))
def test_the_seed_and_the_fold_decide(fields):
    for fold in (0, 1):
        first, again, other = (make(**fields, source=everything(), seed=s, fold=fold) for s in (1, 1, 2))
        for name, ids in first.by_name().items():
            assert np.array_equal(ids, again.by_name()[name])
        changed = any(not np.array_equal(ids, other.by_name()[name]) for name, ids in first.by_name().items())
        shuffled = fields["kind"] in ("holdout", "kfold", "stratified", "bootstrap") and fields.get("shuffle", 1)
        assert changed == bool(shuffled)


# ---- one cut ----


@given(
    n=st.integers(5, 200),
    validation=st.floats(0, 0.45),
    test=st.floats(0, 0.35),
    shuffle=st.booleans(),
    seed=seeds,
)
def test_holdout(n, validation, test, shuffle, seed):
    parts = make("holdout", MemorySource(n), validation=validation, test=test, shuffle=shuffle, seed=seed)
    assert tiles(parts, n)
    assert abs(len(parts.validation) - n * validation) <= 1
    assert abs(len(parts.test) - n * test) <= 1
    if not shuffle:
        assert np.array_equal(np.concatenate(list(parts.by_name().values())), np.arange(n))


@given(st.lists(st.integers(0, 3), min_size=30, max_size=200), seeds, st.sampled_from([0.0, 0.2]))
def test_stratified_holdout_keeps_the_balance(labels, seed, test):
    assume(np.unique(labels, return_counts=True)[1].min() >= 5)
    source = MemorySource(len(labels), kind=np.array(labels))
    parts = make("holdout", source, stratify="kind", validation=0.3, test=test, seed=seed)
    assert tiles(parts, len(labels))
    for ids in parts.by_name().values():
        for label in set(labels):
            share = np.mean(np.array(labels) == label)
            assert abs((np.array(labels)[ids] == label).sum() - share * len(ids)) <= 2


@given(st.lists(st.integers(0, 12), min_size=4, max_size=100), seeds, st.booleans())
def test_grouped_holdout_keeps_groups_together(groups, seed, shuffle):
    assume(len(set(groups)) >= 3)
    source = MemorySource(len(groups), g=np.array([f"g{g}" for g in groups], dtype=object))
    parts = make("holdout", source, group="g", validation=0.3, test=0.2, seed=seed, shuffle=shuffle)
    assert tiles(parts, len(groups))
    train, validation, test = ({groups[i] for i in ids} for ids in parts.by_name().values())
    assert train
    assert validation
    assert test
    assert not train & validation | train & test | validation & test


def test_grouped_holdout_meets_the_share_of_samples():
    source = MemorySource(1000, g=np.arange(1000) // 10)
    parts = make("holdout", source, group="g", validation=0.25, test=0.1)
    assert (len(parts.validation), len(parts.test)) == (250, 100)


def test_the_column_says():
    column = np.array(["train", "val", None, "test", "train"], dtype=object)
    parts = make("column", MemorySource(5, p=column), by="p", ignore=[None])
    assert [ids.tolist() for ids in parts.by_name().values()] == [[0, 4], [1], [3]]
    numbers = make("column", MemorySource(4, p=np.array([0, 1, 2, 0])), by="p", train=[0], validation=[1], test=[2])
    assert [ids.tolist() for ids in numbers.by_name().values()] == [[0, 3], [1], [2]]


def test_a_column_that_says_something_else():
    message = refused("SH354", "column", MemorySource(2, p=np.array(["train", "trian"], dtype=object)), by="p")
    assert "'trian'" in message
    refused("SH354", "column", MemorySource(2, p=np.array(["val", "val"])), by="p")


# ---- folds ----


@given(n=st.integers(2, 100), folds=st.integers(2, 8), shuffle=st.booleans(), seed=seeds)
def test_kfold(n, folds, shuffle, seed):
    assume(n >= folds)
    every = [make("kfold", MemorySource(n), folds=folds, shuffle=shuffle, seed=seed, fold=f) for f in range(folds)]
    assert all(tiles(parts, n) for parts in every)
    assert np.array_equal(np.sort(np.concatenate([parts.validation for parts in every])), np.arange(n))


@given(st.lists(st.integers(0, 3), min_size=20, max_size=150), st.integers(2, 5), seeds)
def test_stratified_folds_keep_the_balance(labels, folds, seed):
    assume(np.unique(labels, return_counts=True)[1].min() >= folds)
    labels = np.array(labels)
    for fold in range(folds):
        source = MemorySource(len(labels), target=labels.astype(float))
        parts = make("stratified", source, folds=folds, seed=seed, fold=fold)
        assert tiles(parts, len(labels))
        for label in np.unique(labels):
            assert abs((labels[parts.validation] == label).sum() - (labels == label).sum() / folds) <= 1


@given(st.lists(st.integers(0, 12), min_size=5, max_size=100), st.integers(2, 5))
def test_grouped_folds_are_disjoint(groups, folds):
    assume(len(set(groups)) >= folds)
    for fold in range(folds):
        parts = make("grouped", MemorySource(len(groups), g=np.array(groups)), by="g", folds=folds, fold=fold)
        assert tiles(parts, len(groups))
        assert len(parts.validation)
        assert not {groups[i] for i in parts.train} & {groups[i] for i in parts.validation}


@given(n=st.integers(2, 200), size=st.floats(0.1, 1), seed=seeds, fold=st.integers(0, 4))
def test_bootstrap_validates_out_of_bag(n, size, seed, fold):
    parts = make("bootstrap", MemorySource(n), size=size, seed=seed, fold=fold)
    assert len(parts.train) == max(1, round(size * n))
    assert np.array_equal(np.union1d(parts.train, parts.validation), np.arange(n))
    assert not np.intersect1d(parts.train, parts.validation).size
    assert len(parts.validation)


def test_bootstrap_leaves_about_a_third():
    parts = make("bootstrap", MemorySource(10_000))
    assert abs(len(parts.validation) / 10_000 - np.exp(-1)) < 0.02


# ---- time ----

times = st.lists(st.integers(0, 400), min_size=30, max_size=120)


def forward_only(parts, when, gap):
    """Training ends before validation begins, with at least `gap` rows between."""
    last, first = when[parts.train].max(), when[parts.validation].min()
    assert last < first
    between = ((when > last) & (when < first)).sum()
    assert between >= gap


@given(times, st.integers(2, 5), st.integers(0, 4), st.sampled_from(["expanding", "sliding"]))
def test_timeseries_never_looks_ahead(when, folds, gap, window):
    when = np.array(when)
    seen = []
    for fold in range(folds):
        try:
            parts = make(
                "timeseries", MemorySource(len(when), t=when), by="t", folds=folds, gap=gap, window=window, fold=fold
            )
        except DataError as failure:
            assume(failure.code not in ("SH351", "SH354"))
            raise
        forward_only(parts, when, gap)
        if window == "sliding":
            assert len(parts.train) <= len(when) // (folds + 1)
        else:
            assert len(parts.train) == (when <= when[parts.train].max()).sum()
        seen.append(parts.validation)
    assert len(np.unique(np.concatenate(seen))) == sum(map(len, seen))


def test_timeseries_by_rows():
    every = [make("timeseries", MemorySource(12), folds=3, gap=1, fold=fold) for fold in range(3)]
    assert [(len(parts.train), parts.validation.tolist()) for parts in every] == [
        (2, [3, 4, 5]), (5, [6, 7, 8]), (8, [9, 10, 11]),
    ]  # fmt: skip
    sliding = make("timeseries", MemorySource(12), folds=3, fold=2, window="sliding", size=4)
    assert sliding.train.tolist() == [5, 6, 7, 8]


def test_times_as_dates():
    days = np.array([f"2024-01-{day:02}T00:00Z" for day in range(20, 0, -1)], dtype=object)
    for when in (days, np.arange("2024-01-20", "2023-12-31", -1, dtype="datetime64[D]")):
        parts = make("timeseries", MemorySource(20, t=when), by="t", folds=4, fold=3)
        assert parts.validation.tolist() == [0, 1, 2, 3]


@given(times, st.integers(2, 5), st.integers(0, 3), st.floats(0, 0.9), st.floats(0.1, 0.6))
def test_windows_never_look_ahead(when, folds, gap, overlap, validation):
    when = np.array(when)
    for fold in range(folds):
        try:
            parts = make("windows", MemorySource(len(when), t=when), by="t", folds=folds, gap=gap, overlap=overlap,
                         validation=validation, fold=fold)  # fmt: skip
        except DataError as failure:
            if failure.code in ("SH351", "SH354"):
                continue
            raise
        forward_only(parts, when, gap)


def test_windows_overlap_and_reach_the_end():
    every = [make("windows", MemorySource(100), folds=3, overlap=0.5, fold=fold) for fold in range(3)]
    rows = [np.concatenate([parts.train, parts.validation]) for parts in every]
    assert [(part.min(), part.max()) for part in rows] == [(0, 49), (25, 74), (50, 99)]
    assert all(len(parts.validation) == 10 for parts in every)


# ---- what is not possible ----


def test_too_few_samples():
    refused("SH351", "holdout", MemorySource(1))
    refused("SH351", "kfold", MemorySource(3), folds=4)
    refused("SH351", "bootstrap", MemorySource(1))
    refused("SH351", "timeseries", MemorySource(5), folds=5)
    refused("SH351", "timeseries", MemorySource(12), folds=3, gap=3)
    refused("SH351", "windows", MemorySource(6), folds=4, gap=2)
    refused("SH351", "grouped", MemorySource(9, g=np.arange(9) % 3), by="g", folds=4)


def test_a_class_smaller_than_the_folds():
    labels = np.array([0] * 20 + [1] * 3)
    assert "only 3 samples" in refused("SH351", "stratified", MemorySource(23, target=labels), folds=5)
    refused("SH351", "holdout", MemorySource(3, target=np.array([0, 0, 1])), stratify=True)


def test_missing_columns():
    source = MemorySource(20, when=np.arange(20), user=np.arange(20))
    assert "Did you mean 'user'" in refused("SH352", "grouped", source, by="usr")
    assert "Did you mean 'when'" in refused("SH352", "timeseries", source, by="wehn")
    assert "no target" in refused("SH352", "stratified", source)
    refused("SH352", "holdout", source, stratify="label")
    refused("SH352", "column", source, by="part")


def test_data_that_does_not_fit():
    source = MemorySource(
        20,
        target=np.linspace(0, 1, 20),
        one=np.zeros(20),
        word=np.array(["a"] * 20, dtype=object),
        hole=np.array([np.nan] * 20),
        wide=np.zeros((20, 2)),
    )
    assert "continuous" in refused("SH354", "stratified", source)
    assert "continuous" in refused("SH354", "holdout", source, stratify=True)
    assert "one group" in refused("SH354", "grouped", source, by="one")
    assert "one group" in refused("SH354", "holdout", source, group="one")
    assert "no times" in refused("SH354", "timeseries", source, by="word")
    assert "missing" in refused("SH354", "timeseries", source, by="hole")
    assert "same time" in refused("SH354", "timeseries", source, by="one")
    assert "several values" in refused("SH354", "grouped", source, by="wide")


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "holdout", "validation": 0.6, "test": 0.5},
        {"kind": "holdout", "stratify": True, "group": "g"},
        {"kind": "holdout", "stratify": True, "shuffle": False},
        {"kind": "kfold", "folds": 3, "fold": 3},
        {"kind": "timeseries", "size": 10},
        {"kind": "column", "by": "p", "train": ["test"]},
    ],
)
def test_specs_that_contradict_themselves(fields):
    with pytest.raises(ValidationError):
        spec_of(**fields)
