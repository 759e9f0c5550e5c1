"""Columns of categories, times and gaps as inputs; partition columns; weights of samples."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.nn import functional

from shoal.data.batch import Batch
from shoal.data.datasets import open_datasets
from shoal.data.fitted import Fitted
from shoal.errors import ShoalError
from shoal.spec.data import DataConfig
from shoal.tasks.task import PlainTask
from tests.data.source_helpers import open_failure, open_spec, read_all

CSV = "city,when,age,y\nRome,2024-01-01 00:00:00,10,0\nOslo,2024-01-01T12:00,,1\nRome,2024-01-04,30,0\n"


@pytest.fixture
def csv(tmp_path):
    (tmp_path / "t.csv").write_text(CSV)
    return {"kind": "csv", "path": "t.csv", "target": "y", "inputs": ["city", "when", "age"]}


def inputs_of(tmp_path, **spec):
    return read_all(open_spec(tmp_path, **spec)).inputs[0]


def test_categories_times_and_gaps_of_a_csv_file(tmp_path, csv):
    found = inputs_of(tmp_path, **csv, encode={"city": "onehot", "when": "calendar"}, missing={"age": "flag"})
    assert found[:, :2].tolist() == [[0, 1], [1, 0], [0, 1]]  # Oslo, Rome
    # 2024-01-01 was a Monday: midnight is the beginning of the day and of the week.
    expected = [[0, 1, 0, 1], [0, -1, np.sin(np.pi / 7), np.cos(np.pi / 7)]]
    assert torch.allclose(found[:2, 2:6], torch.tensor(expected, dtype=torch.float32), atol=1e-5)
    assert found[:, 8:].tolist() == [[10, 0], [20, 1], [30, 0]]


def test_numbers_of_categories_and_standard_values(tmp_path, csv):
    found = inputs_of(tmp_path, **csv, encode={"city": "number", "when": "standard", "age": "standard"},
                      missing={"age": "mean"})  # fmt: skip
    assert found[:, 0].tolist() == [2, 1, 2]
    assert found[:, 1].mean().item() == pytest.approx(0, abs=1e-6)
    assert found[:, 1].std(correction=0).item() == pytest.approx(1)
    assert found[:, 2].tolist() == pytest.approx([-1, 0, 1])


def test_a_number_stands_for_a_missing_value(tmp_path, csv):
    found = inputs_of(tmp_path, **csv | {"inputs": "age"}, missing={"age": -1})
    assert found[:, 0].tolist() == [10, -1, 30]


def test_nan_is_a_missing_value_too(tmp_path):
    """As numpy and polars write it."""
    pq.write_table(pa.table({"age": np.array([10, np.nan, 30]), "y": [0, 1, 0]}), tmp_path / "t.parquet")
    spec = {"kind": "parquet", "path": "t.parquet", "target": "y"}
    assert inputs_of(tmp_path, **spec, missing={"age": "flag"}).tolist() == [[10, 0], [20, 1], [30, 0]]
    assert inputs_of(tmp_path, **spec, missing={"age": -1}).tolist() == [[10], [-1], [30]]
    assert open_failure(tmp_path, **spec).code == "SH305"


def test_times_with_a_zone_are_the_moments_that_they_name(tmp_path):
    """One moment as texts with and without a zone, and as timestamps of another zone."""
    words = ["2024-03-01T12:00:00", "2024-03-01T12:00Z", "2024-03-01 14:00:00.0+02:00", "2024-03-01T06:30-0530"]
    (tmp_path / "t.csv").write_text("when,y\n" + "".join(f"{word},0\n" for word in words))
    texts = inputs_of(tmp_path, kind="csv", path="t.csv", target="y", encode={"when": "calendar"})
    moment = pa.array([np.datetime64("2024-03-01T12:00:00", "us")]).cast(pa.timestamp("us", tz="Europe/Berlin"))
    pq.write_table(pa.table({"when": moment, "y": [0]}), tmp_path / "t.parquet")
    found = inputs_of(tmp_path, kind="parquet", path="t.parquet", target="y", encode={"when": "calendar"})
    assert all(torch.equal(row, found[0]) for row in texts)


def test_a_gap_without_a_policy_is_a_bad_row(tmp_path, csv):
    problem = open_failure(tmp_path, **csv, encode={"city": "onehot", "when": "calendar"})
    assert problem.code == "SH305"
    assert "t.csv:3" in str(problem)


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({}, "SH310", "encode: {city: onehot}"),
        ({"encode": {"town": "onehot"}}, "SH303", "town"),
        ({"encode": {"age": "calendar"}}, "SH833", "numbers"),
        ({"inputs": "age", "encode": {"city": "onehot"}}, "SH833", "no input"),
        ({"inputs": "city", "encode": {"city": "calendar"}}, "SH304", "'Rome' cannot be encoded"),
    ],
)
def test_encodings_that_do_not_fit(tmp_path, csv, change, code, says):
    problem = open_failure(tmp_path, **csv | change)
    assert problem.code == code
    assert says in str(problem) + problem.fix


def test_later_data_is_encoded_like_the_training_data(tmp_path, csv):
    options = csv | {"encode": {"city": "onehot", "when": "standard"}, "missing": {"age": "mean", "city": "unknown"}}
    train = open_spec(tmp_path, **options)
    (tmp_path / "new.csv").write_text("city,when,age\nParis,2030-01-01,\nOslo,2024-01-01,5\n,2024-01-01,5\n")
    info = json.loads(json.dumps({"job": {}, **Fitted.of(train).model_info()}))
    assert Fitted.of_model(info) == Fitted.of(train)
    new = read_all(open_spec(tmp_path, **options | {"path": "new.csv", "target": None}, training_source=train)).inputs[
        0
    ]
    assert new[:, :2].tolist() == [[0, 0], [1, 0], [0, 0]]
    assert new[1, 2] == read_all(train).inputs[0][0, 2]
    assert new[:, 3].tolist() == [20, 5, 5]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_later_data_has_the_input_columns_of_the_training_data(tmp_path, kind):
    """In their order, whatever the order of the table is, and no others."""

    def written(name, **columns):
        path = tmp_path / f"{name}.{kind}"
        if kind == "csv":
            rows = zip(*columns.values(), strict=True)
            path.write_text("\n".join([",".join(columns), *(",".join(map(str, row)) for row in rows)]) + "\n")
        else:
            pq.write_table(pa.table(columns), path)
        return {"kind": kind, "path": path.name}

    train = open_spec(tmp_path, **written("t", a=[1, 2], b=[3, 4], y=[0, 1]), target="y")
    new = written("new", extra=[9, 9], b=[30, 40], y=[0, 1], a=[10, 20])
    for more in ({"target": "y"}, {}):  # also data without labels, whose target is a column like others
        found = open_spec(tmp_path, **new, **more, training_source=train)
        assert read_all(found).inputs[0].tolist() == [[10, 30], [20, 40]]
    assert read_all(open_spec(tmp_path, **new, inputs="extra", training_source=train)).inputs[0].tolist() == [[9], [9]]
    assert open_failure(tmp_path, **written("less", a=[1], extra=[2]), training_source=train).code == "SH303"


def test_a_large_table_is_encoded_group_by_group(tmp_path, monkeypatch, csv):
    """The same rows from memory, by row group, and through the cache."""
    rows = 600
    table = pa.table({
        "city": pa.array([["a", "b", None][i % 3] for i in range(rows)]).dictionary_encode(),
        "when": pa.array(np.datetime64("2024-01-01", "us") + np.arange(rows) * np.timedelta64(3600, "s")),
        "age": pa.array([None if i % 5 == 0 else i for i in range(rows)], pa.int32()),
        "y": np.arange(rows) % 2,
    })  # fmt: skip
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=100)
    spec = {"kind": "parquet", "path": "t.parquet", "target": "y", "encode": {"city": "number", "when": "calendar"},
            "missing": {"age": "flag", "city": "unknown"}}  # fmt: skip
    held = open_spec(tmp_path, **spec)
    monkeypatch.setattr("shoal.data.sources.parquet_table.SMALL_BYTES", 10)
    grouped = open_spec(tmp_path, **spec)
    assert grouped.blocks is not None
    monkeypatch.setattr("shoal.data.sources.parquet_table._HUGE_GROUP_BYTES", 10)
    cached = [open_spec(tmp_path, **spec) for _ in range(2)]
    ids = np.random.default_rng(0).permutation(rows)
    for other in (grouped, *cached):
        assert Fitted.of(other) == Fitted.of(held)
        assert torch.equal(other.take(ids).inputs[0], held.take(ids).inputs[0])
        assert torch.equal(other.take(ids).target, held.take(ids).target)


# ---- partitions and structs ----


def test_partition_columns_and_fields_of_structs(tmp_path):
    for year in (2023, 2024):
        for site in ("north", "__HIVE_DEFAULT_PARTITION__"):
            place = tmp_path / "t" / f"year={year}" / f"site={site}"
            place.mkdir(parents=True)
            inner = pa.array([{"a": year + 0.5, "b": {"c": i}} for i in range(2)])
            pq.write_table(pa.table({"s": inner, "y": [0, 1]}), place / "p.parquet")
    source = open_spec(tmp_path, kind="parquet", path="t", target="y", encode={"site": "onehot"},
                       missing={"site": "unknown"})  # fmt: skip
    assert source.own_columns() == ["s.a", "s.b.c", "y", "year", "site"]
    rows = read_all(source).inputs[0].tolist()
    assert rows[0] == [2023.5, 0, 2023, 0]
    assert rows[-1] == [2024.5, 1, 2024, 1]
    assert source.column("year").tolist() == [2023] * 4 + [2024] * 4
    only = open_spec(tmp_path, kind="parquet", path="t", target="y", inputs="year")
    assert sorted(set(read_all(only).inputs[0].flatten().tolist())) == [2023, 2024]
    fixed = open_spec(tmp_path, kind="parquet", path="t/year=2024/site=north", target="y")
    assert "year" not in fixed.own_columns()


def test_partition_columns_of_csv_files(tmp_path):
    for day in ("2024-01-01", "2024-01-02"):
        (tmp_path / "t" / f"day={day}").mkdir(parents=True)
        (tmp_path / "t" / f"day={day}" / "p.csv").write_text("x,y\n1,0\n2,1\n")
    source = open_spec(tmp_path, kind="csv", path="t/*/p.csv", target="y", encode={"day": "number"})
    assert read_all(source).inputs[0].tolist() == [[1, 1], [2, 1], [1, 2], [2, 2]]


def test_files_with_other_partitions_are_refused(tmp_path):
    for place in ("a=1", "b=1"):
        (tmp_path / "t" / place).mkdir(parents=True)
        pq.write_table(pa.table({"x": [1.0]}), tmp_path / "t" / place / "p.parquet")
    assert open_failure(tmp_path, kind="parquet", path="t").code == "SH306"


# ---- weights of samples ----


def datasets(tmp_path, **changes):
    (tmp_path / "w.csv").write_text("x,w,y\n1,0.5,0\n2,2,1\n3,0,1\n")
    data = {"source": {"kind": "csv", "path": "w.csv", "target": "y"}, "weight": "w", **changes}
    return open_datasets(DataConfig.model_validate(data), seed=0, base_dir=str(tmp_path), cache_dir=tmp_path)


def test_weights_are_no_input_and_come_with_the_batch(tmp_path):
    batch = datasets(tmp_path).train.source.take(np.array([2, 0]))
    assert batch.inputs[0].tolist() == [[3], [1]]
    assert batch.weight.tolist() == [0, 0.5]
    assert [part.weight.tolist() for part in batch.chunk(2)] == [[0], [0.5]]


def test_weights_are_no_input_of_other_data_either(tmp_path):
    """A validation file with its columns in another order."""
    (tmp_path / "v.csv").write_text("y,w,x\n0,5,7\n1,6,8\n")
    found = datasets(tmp_path, validation={"kind": "csv", "path": "v.csv", "target": "y"})
    batch = found.held_out["validation"].source.take(np.arange(2))
    assert (batch.inputs[0].tolist(), batch.weight.tolist()) == ([[7], [8]], [5, 6])
    assert Fitted.of(found.train.source).input_columns == ("x",)


def test_weights_of_a_file(tmp_path):
    np.save(tmp_path / "w.npy", np.array([1.0, 2.0, 3.0]))
    assert datasets(tmp_path, weight="w.npy").train.source.take(np.array([1])).weight.tolist() == [2]


@pytest.mark.parametrize("weight", ["nothing", "x2.npy"])
def test_weights_that_are_not_there(tmp_path, weight):
    with pytest.raises(ShoalError) as caught:
        datasets(tmp_path, weight=weight)
    assert caught.value.code in ("SH831", "SH301")


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (nn.CrossEntropyLoss(), torch.tensor([0, 2, 1, 1])),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3]), label_smoothing=0.1), torch.tensor([0, 2, 1, 1])),
        (nn.CrossEntropyLoss(ignore_index=2), torch.tensor([0, 2, 1, 1])),
        (nn.MSELoss(), torch.rand(4, 3)),
        (nn.BCEWithLogitsLoss(), torch.rand(4, 3)),
        (functional.l1_loss, torch.rand(4, 3)),
    ],
)
def test_a_weight_of_two_is_a_sample_twice(loss, target):
    """The reference is the loss of the repeated samples."""
    torch.manual_seed(0)
    model, x = nn.Linear(5, 3), torch.rand(4, 5)
    times = torch.tensor([1, 3, 0, 2])
    task = PlainTask(model, loss)
    total, weight = task.loss(model, Batch((x,), target, 4, times.double()))
    repeated = loss(model(x.repeat_interleave(times, 0)), target.repeat_interleave(times, 0))
    assert float(total) / float(weight) == pytest.approx(float(repeated), rel=1e-6)
    value, divisor = task.evaluate(model, Batch((x,), target, 4, times.double()))[0]
    assert (float(value), float(divisor)) == (float(total), float(weight))


def test_a_loss_that_cannot_be_weighted_is_refused():
    model = nn.Linear(5, 3)
    task = PlainTask(model, lambda output, target: output.mean())
    with pytest.raises(ShoalError) as caught:
        task.loss(model, Batch((torch.rand(4, 5),), None, 4, torch.ones(4)))
    assert caught.value.code == "SH832"
