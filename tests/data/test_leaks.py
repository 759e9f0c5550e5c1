"""What stands on both sides is found; what does not is not."""

from __future__ import annotations

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.data import sample_hash
from shoal.data.batch import Batch
from shoal.data.leaks import find_leaks
from shoal.data.report import export_split, split_report
from shoal.data.sample_hash import hash_samples, hash_values
from shoal.data.split import SplitIds, split
from shoal.spec.data import (
    GroupedSplitConfig,
    HoldoutSplitConfig,
    NoSplitConfig,
    StratifiedSplitConfig,
    TimeSeriesSplitConfig,
)

from .memory_source import MemorySource


def ids(*numbers):
    return np.array(numbers, dtype=np.int64)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=40), st.data())
def test_identical_rows_are_found_and_no_others(rows, data):
    where = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows))))
    x, target = (np.array([row[i] for row in rows], dtype=np.float32) for i in (0, 1))
    parts = SplitIds(*(np.flatnonzero(where == part) for part in range(3)))
    leaks = find_leaks(parts, MemorySource(len(rows), x=x[:, None], target=target), NoSplitConfig(), max_pairs=1000)
    found = {(leak.left, leak.right): leak for leak in leaks}
    named = parts.by_name()
    for left, right in (("train", "validation"), ("train", "test"), ("validation", "test")):
        known = {rows[i] for i in named[left]}
        doubles = [i for i in named[right] if rows[i] in known]
        leak = found.get((left, right))
        assert (leak.count if leak else 0) == len(doubles)
        if leak:
            assert [pair[1] for pair in leak.pairs] == doubles
            assert all(rows[a] == rows[b] and a in named[left] for a, b in leak.pairs)


def test_the_target_counts():
    x = np.zeros((2, 3), dtype=np.float32)
    same, other = (MemorySource(2, x=x, target=np.array(target)) for target in ([1, 1], [1, 2]))
    assert find_leaks(SplitIds(ids(0), ids(1)), same, NoSplitConfig())
    assert not find_leaks(SplitIds(ids(0), ids(1)), other, NoSplitConfig())


def test_groups_on_both_sides():
    source = MemorySource(6, user=np.array(list("aabbcc"), dtype=object))
    (leak,) = find_leaks(SplitIds(ids(0, 1, 2), ids(3, 4, 5)), source, GroupedSplitConfig(kind="grouped", by="user"))
    assert (leak.kind, leak.count, leak.pairs) == ("group", 1, ((2, 3),))
    assert "'user'" in str(leak)
    held = HoldoutSplitConfig(kind="holdout", group="user")
    assert not find_leaks(SplitIds(ids(0, 1), ids(2, 3)), source, held)


def test_times_on_both_sides():
    source = MemorySource(6, t=np.array([1.0, 2, 3, 3, 2, 4]))
    spec = TimeSeriesSplitConfig(kind="timeseries", by="t")
    (leak,) = find_leaks(SplitIds(ids(0, 1, 2), ids(3, 4, 5)), source, spec)
    assert (leak.kind, leak.count, leak.pairs) == ("time", 2, ((2, 3), (2, 4)))
    assert not find_leaks(SplitIds(ids(0, 1, 2), ids(5)), source, spec)
    assert find_leaks(SplitIds(ids(0, 5), ids(1)), source, TimeSeriesSplitConfig(kind="timeseries"))


def test_without_a_column_the_order_of_rows_counts_whatever_the_data_calls_id():
    """The split goes by rows; a column 'id' of the data is none of its business."""
    source = MemorySource(6, x=np.arange(6.0), id=np.array([9, 8, 7, 3, 2, 1]))
    spec = TimeSeriesSplitConfig(kind="timeseries", folds=2)
    parts = split(spec, source, seed=0, fold=1)
    assert not find_leaks(parts, source, spec)
    report = split_report(source, {1: parts}, spec)
    assert report["folds"][0]["parts"]["train"]["time"] == [0, 3]
    assert "the order of rows" in report["checks"][2]["how"]
    (leak,) = find_leaks(SplitIds(ids(0, 5), ids(1)), source, spec)
    assert "row order" in str(leak)


def test_one_sample_is_singular():
    source = MemorySource(3, x=np.array([[0], [1], [0]]), person=np.array([4, 5, 4]))
    parts = SplitIds(ids(0, 1), ids(2))
    leaks = find_leaks(parts, source, HoldoutSplitConfig(kind="holdout", group="person"))
    assert [leak.summary for leak in leaks] == [
        "1 sample of validation is identical to samples of train",
        "1 sample of validation has a 'person' that is also in train",
    ]


def test_only_some_are_named():
    source = MemorySource(40, x=np.zeros(40))
    (leak,) = find_leaks(SplitIds(np.arange(20), np.arange(20, 40)), source, NoSplitConfig(), max_pairs=4)
    assert (leak.count, len(leak.pairs)) == (20, 4)
    assert str(leak).startswith("20 samples of validation are identical to samples of train: 20 (like 0)")
    assert str(leak).endswith("…")


def test_a_bootstrap_does_not_leak_into_itself():
    assert not find_leaks(SplitIds(ids(1, 1, 1), ids(0, 2)), MemorySource(3), NoSplitConfig())


# ---- digests ----


@given(st.integers(1, 40), st.integers(1, 400))
def test_chunks_do_not_matter(width, n):
    source = MemorySource(n, x=np.arange(n * width, dtype=np.float32).reshape(n, width), target=np.arange(n) % 2)
    whole = hash_samples(source, np.arange(n))
    assert len(np.unique(whole)) == n
    assert np.array_equal(hash_samples(source, np.arange(n)[::-1]), whole[::-1])


def test_reads_a_bounded_number_of_bytes(monkeypatch):
    monkeypatch.setattr(sample_hash, "_CHUNK_BYTES", 4000)
    taken = []

    class Watched(MemorySource):
        def take(self, ids):
            taken.append(len(ids))
            return super().take(ids)

    hash_samples(Watched(500, x=np.zeros((500, 100))), np.arange(500))
    assert max(taken[1:]) == 5
    assert sum(taken) == 500


def test_samples_of_any_make():
    class Nested(MemorySource):
        def take(self, ids):
            words = [f"w{i % 4}" for i in ids]
            numbers = torch.from_numpy(ids % 3)
            return Batch(({"a": numbers.bfloat16(), "b": [numbers.bool(), words]},), None, len(ids))

    digests = hash_samples(Nested(24), np.arange(24))
    assert len(np.unique(digests)) == 12
    assert np.array_equal(digests[:12], digests[12:])


@pytest.mark.parametrize(
    "values",
    [
        np.arange(50),
        np.arange(50) / 7,
        np.array([f"{i}" for i in range(50)]),
        np.array([None, *range(49)], dtype=object),
        np.arange("2024-01-01", "2024-02-20", dtype="datetime64[D]"),
    ],
)
def test_digests_of_values(values):
    digests = hash_values(values)
    assert len(np.unique(digests)) == 50
    assert np.array_equal(hash_values(values[[3, 3, 7]]), digests[[3, 3, 7]])


# ---- the report and the file ----


def test_a_report_of_classes():
    source = MemorySource(30, x=np.arange(30.0), target=np.arange(30) % 3)
    spec = StratifiedSplitConfig(kind="stratified", folds=2)
    report = split_report(source, {fold: split(spec, source, seed=0, fold=fold) for fold in range(2)}, spec)
    assert json.loads(json.dumps(report)) is not None
    part = report["folds"][1]["parts"]["validation"]
    assert (part["size"], part["share"]) == (15, 0.5)
    assert part["classes"]["2"] == {"count": 5, "share": 1 / 3}
    assert report["folds"][0]["leaks"] == []
    assert "test" not in report["folds"][0]["parts"]


def test_a_report_of_numbers_and_times():
    days = np.arange("2024-01-01", "2024-01-31", dtype="datetime64[D]")
    source = MemorySource(30, x=np.zeros(30), target=np.arange(30) / 2, day=days)
    spec = TimeSeriesSplitConfig(kind="timeseries", folds=2, by="day")
    report = json.loads(json.dumps(split_report(source, {0: split(spec, source, seed=0)}, spec)))
    train = report["folds"][0]["parts"]["train"]
    assert train["time"] == ["2024-01-01", "2024-01-10"]
    assert train["target"]["mean"] == 2.25
    assert (train["target"]["min"], train["target"]["max"]) == (0.0, 4.5)
    assert report["folds"][0]["leaks"] == []


def test_a_report_without_target_tells_groups_and_leaks():
    source = MemorySource(4, x=np.zeros(4), user=np.array([1, 1, 2, 2]))
    spec = GroupedSplitConfig(kind="grouped", by="user", folds=2)
    report = json.loads(json.dumps(split_report(source, {0: SplitIds(ids(0, 1), ids(2, 3))}, spec)))
    assert report["folds"][0]["parts"]["train"] == {"size": 2, "share": 0.5, "groups": 1}
    assert report["folds"][0]["leaks"][0]["kind"] == "rows"


def test_the_split_as_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.data.report._CHUNK_ROWS", 3)
    words = np.array([f"w{i}" for i in range(10)], dtype=object)
    source = MemorySource(10, word=words, part=np.arange(10) / 2, mixed=np.array([1, "a"] * 5, dtype=object))
    folds = {0: SplitIds(np.arange(8), ids(8, 9)), 1: SplitIds(ids(1, 1, 3), ids(0))}
    path = export_split(folds, source, tmp_path / "out")
    rows = pq.read_table(path).to_pylist()
    assert [p.name for p in path.parent.iterdir()] == ["split.parquet"]
    assert len(rows) == 14
    assert rows[9] == {"fold": 0, "part": "validation", "id": 9, "word": "w9", "data.part": 4.5, "mixed": "a"}
    assert [row["id"] for row in rows if row["fold"] == 1 and row["part"] == "train"] == [1, 1, 3]


def test_a_source_without_columns_brings_its_target(tmp_path):
    source = MemorySource(3, target=np.array([[1, 2], [3, 4], [5, 6]]))
    rows = pq.read_table(export_split({0: SplitIds(np.arange(3))}, source, tmp_path)).to_pylist()
    assert rows[1] == {"fold": 0, "part": "train", "id": 1, "target": [3, 4]}
