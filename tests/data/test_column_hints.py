"""Columns that look like groups or times are offered, and what the split does with them is counted."""

from __future__ import annotations

import io

import numpy as np
import pytest
import yaml
from pydantic import TypeAdapter
from rich.console import Console

from shoal.data.column_hints import find_column_hints
from shoal.data.report import split_report
from shoal.data.split import SplitIds, split
from shoal.spec import data as spec_of
from shoal.terminal.splits import print_split

from .memory_source import MemorySource

N = 60
HOLDOUT = spec_of.HoldoutSplitConfig(kind="holdout")


def days(n=N):
    return np.datetime64("2024-01-01") + np.arange(n)


def hints(spec=HOLDOUT, **columns):
    source = MemorySource(N, x=np.arange(N * 2.0).reshape(N, 2), **columns)
    folds = {0: split(spec, source, seed=0)}
    return {hint.column: hint for hint in find_column_hints(source, folds, spec)}


@pytest.mark.parametrize(
    "column",
    [
        {"user_id": np.arange(N) // 3},
        {"id": np.arange(N) // 2},
        {"patient": np.array([f"p{i // 4}" for i in range(N)], dtype=object)},
        {"subject_no": (np.arange(N) // 3).astype(np.float64)},
        {"cluster": np.array([f"{i % 8:x}c" for i in range(N)], dtype=object)},
        {"fileSite.Id": np.arange(N) // 5},
    ],
    ids=lambda column: next(iter(column)),
)
def test_groups_are_recognised_by_name_or_by_texts_that_repeat(column):
    (name,) = column
    hint = hints(**column)[name]
    assert hint.role == "groups"
    assert hint.separated is not None
    assert f"'{name}' that is also in" in hint.separated


@pytest.mark.parametrize(
    "column",
    [
        {"when": days()},
        {"date": np.array([str(d) for d in days()], dtype=object)},
        {"logged": np.array([f"{d} 07:00:00" for d in days()], dtype=object)},
        {"timestamp": np.arange(N) * 7.5},
        {"created_at": np.random.default_rng(0).permutation(N)},
        {"odometer": np.cumsum(np.arange(N) % 4)},
    ],
    ids=lambda column: next(iter(column)),
)
def test_times_are_recognised_by_type_text_name_or_order(column):
    (hint,) = hints(**column).values()
    assert hint.role == "times"
    assert hint.separated is not None
    assert "are not later in" in hint.separated


@pytest.mark.parametrize(
    "column",
    [
        {"height": np.random.default_rng(0).normal(size=N)},
        {"rooms": np.arange(N) % 5},  # a number that repeats is not yet a group
        {"row": np.arange(N)},
        {"user_id": np.arange(N)},  # each once
        {"user_id": np.zeros(N)},
        {"colour": np.array(["red", "green"] * (N // 2), dtype=object)},
        {"note": np.array([f"text {i}" for i in range(N)], dtype=object)},
        {"pixels": np.zeros((N, 4))},
        {"year": np.full(N, 2024)},
        {"date": np.array(["2024-01-01", None] * (N // 2), dtype=object)},  # no split could use it
    ],
    ids=lambda column: next(iter(column)),
)
def test_other_columns_are_not(column):
    assert hints(**column) == {}


def test_the_target_under_its_own_name_is_not_a_group():
    words = np.array([f"class {i % 6}" for i in range(N)], dtype=object)
    assert hints(species=words, target=np.arange(N) % 6) == {}
    assert "species" in hints(species=words, target=np.arange(N) % 5)
    took = np.arange(N) * 1.5
    assert hints(gpu_time=took, target=took[:, None]) == {}
    assert "gpu_time" in hints(gpu_time=took, target=took[::-1])


def test_what_the_split_uses_is_not_offered_again():
    grouped = spec_of.GroupedSplitConfig(kind="grouped", by="user", folds=2)
    assert hints(grouped, user=np.arange(N) // 3) == {}
    series = spec_of.TimeSeriesSplitConfig(kind="timeseries", by="when", folds=2)
    assert hints(series, when=days()) == {}


def test_a_column_that_the_split_happens_to_respect():
    series = spec_of.TimeSeriesSplitConfig(kind="timeseries", folds=2)
    assert hints(series, when=days())["when"].separated is None
    assert hints(series, when=days()[::-1])["when"].separated is not None


@pytest.mark.parametrize(
    "split_of",
    [
        {"kind": "holdout"},
        {"kind": "holdout", "validation": 0.1, "test": 0.1},
        {"kind": "holdout", "stratify": True},
        {"kind": "kfold", "folds": 3},
        {"kind": "bootstrap", "folds": 2},
        {"kind": "windows", "folds": 2},
    ],
    ids=str,
)
def test_the_offered_line_mends_it(split_of):
    """Written into the job, the line is valid, and the column is separated no more."""
    parse = TypeAdapter(spec_of.SplitConfig).validate_python
    columns = {"my user": np.arange(N) % 12, "when": days(), "target": np.arange(N) % 2}
    found = hints(parse(split_of), **columns)
    if split_of["kind"] != "windows":  # it keeps the order of rows, which is the order of `when`
        line = parse(yaml.safe_load(found["when"].job_line)["split"])
        assert "when" not in hints(line, **columns)
    line = parse(yaml.safe_load(found["my user"].job_line)["split"])
    source = MemorySource(N, x=np.arange(N), **columns)
    report = split_report(source, {0: split(line, source, seed=0)}, line)
    assert report["checks"][1] == {"what": "groups", "checked": True, "how": "by column 'my user'"}
    assert report["folds"][0]["leaks"] == []


def printed(spec, source, *, own_sources=()):
    report = split_report(source, {0: split(spec, source, seed=0)}, spec)
    console = Console(file=io.StringIO(), width=200)
    own = {name: {"size": 3} for name in own_sources}
    print_split(console, {"report": report, "own_sources": own, "leaks_between_sources": [], "exported": None})
    return console.file.getvalue()


def test_what_was_not_looked_at_is_said():
    text = printed(HOLDOUT, MemorySource(N, x=np.arange(N), user_id=np.arange(N) // 3))
    assert "no leaks" not in text
    assert "duplicates  checked by a hash of inputs and target: no leak" in text
    assert "groups      NOT checked: the split names no column of groups" in text
    assert "time order  NOT checked: the split names no column of times" in text
    assert "column 'user_id' looks like groups (its name; 20 values, 3.0 samples each)" in text
    assert "split: {kind: holdout, validation: 0.2, group: user_id}" in text


def test_what_was_found_is_said_too():
    spec = spec_of.GroupedSplitConfig(kind="grouped", by="user", folds=2)
    text = printed(spec, MemorySource(N, x=np.zeros(N), user=np.arange(N) // 3))
    assert "duplicates  checked by a hash of inputs and target: leaks, see above" in text
    assert "groups      checked by column 'user': no leak" in text


def test_a_single_part_has_nothing_to_compare():
    text = printed(spec_of.NoSplitConfig(), MemorySource(N, user_id=np.arange(N) // 3), own_sources=["validation"])
    assert text.count("NOT checked: all samples are in one part") == 3
    assert "looks like" not in text
    assert "own source of validation: duplicates checked, groups and times NOT" in text


def test_a_test_part_is_held_against_time_too():
    source = MemorySource(4, when=np.array([3, 1, 2, 9]))
    spec = spec_of.HoldoutSplitConfig(kind="holdout", validation=0, test=0.5)
    folds = {0: SplitIds(np.array([0, 1]), test=np.array([2, 3]))}
    assert find_column_hints(source, folds, spec) == []  # `when` is neither a name nor in order
    source = MemorySource(4, time=np.array([3, 1, 2, 9]))
    (hint,) = find_column_hints(source, folds, spec)
    assert hint.separated == "1 sample of test is not later in 'time' than all of train"
