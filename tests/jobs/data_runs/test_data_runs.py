"""Data: what users bring."""

import io
import json
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import shoal
from shoal.data.fitted import Fitted
from shoal.data.source import open_source
from tests.conftest import MLP

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("limited_time")]
BASE = MLP | {"batch_size": 16, "steps": 12, "evaluate": {"every_steps": 6}}
TWO_CLASSES = {"name": "models.py:mlp", "args": {"inputs": 6, "classes": 2}}
HOLDOUT = {"kind": "holdout", "validation": 0.25}


@pytest.fixture
def limited_time():
    from tests.jobs.fault_injection import time_limit

    with time_limit(240):
        yield


@pytest.mark.compat_row("collate function, variable lengths", "works", how="`source: {kind: python, collate: ...}`")
@pytest.mark.compat_row("lanes of equal length", "works", how="`sampler: balanced`")
def test_a_collate_function_and_variable_lengths(same_bits):
    source = {"kind": "python", "factory": "user_data.py:Sequences", "collate": "user_data.py:pad"}
    data = {"source": source, "split": HOLDOUT, "sampler": "balanced"}
    same_bits(BASE | {"model": "user_data.py:MeanOfWords", "data": data})


@pytest.mark.compat_row("IterableDataset, exactly-once resume", "works", how="`source: {kind: python, window: ...}`")
@pytest.mark.parametrize("name", ["Numbers", "SkippingNumbers"])
def test_a_stream(same_bits, name):
    source = {"kind": "python", "factory": f"user_data.py:{name}", "window": 24}
    data = {"source": source, "split": HOLDOUT | {"shuffle": False}}
    outcome = same_bits(BASE | {"model": TWO_CLASSES, "data": data})
    assert outcome.receipt.samples_seen == 2 * 75 + 2 * 16  # 75 of 100 samples train: 5 steps in an epoch


@pytest.fixture
def trips(job_dir):
    """Trips in partitions of day and city, with times, dates, gaps and weights."""
    rng = np.random.default_rng(0)
    for day in ("2024-01-01", "2024-01-02"):
        for zone in (1, 2, 3):
            rows = 30
            ages = [None if i % 7 == 0 else float(i) for i in range(rows)]
            table = pa.table(
                {
                    "age": pa.array(ages, pa.float64()),
                    "city": pa.array([None if i % 11 == 0 else ["Oslo", "Rome", "Bonn"][i % 3] for i in range(rows)]),
                    "start": pa.array(
                        np.datetime64(day) + rng.integers(0, 86_400, rows).astype("timedelta64[s]"), pa.timestamp("us")
                    ),
                    "born": pa.array(np.datetime64("1990-05-01") + np.arange(rows)),
                    "importance": rng.integers(0, 4, rows).astype(np.float64),
                    "label": pa.array([["no", "yes"][int(v)] for v in rng.integers(0, 2, rows)]),
                }
            )
            place = job_dir / "trips" / f"day={day}" / f"zone={zone}"
            place.mkdir(parents=True)
            pq.write_table(table, place / "part-0.parquet")
    return {
        "kind": "parquet",
        "path": "trips",
        "target": "label",
        "encode": {"city": "onehot", "start": "calendar", "born": "standard", "day": "number"},
        "missing": {"age": "flag", "city": "unknown"},
    }


@pytest.mark.compat_row("hive-partition columns", "works", how="directories `year=2024` are columns")
@pytest.mark.compat_row("timestamps and dates", "works", how="`encode: {when: calendar}` or `standard`")
@pytest.mark.compat_row("categories", "works", how="`encode: {city: onehot}` or `number`; saved in model.json")
@pytest.mark.compat_row("nullable columns", "works", how="`missing: {age: flag}`, `mean`, a number, `unknown`")
@pytest.mark.compat_row("per-sample weights", "works", how="`data.weight: column`")
def test_a_table_of_everything(run, same_bits, trips, job_dir):
    model = {"name": "models.py:mlp", "args": {"inputs": 14, "classes": 2}}
    data = {"source": trips, "split": HOLDOUT, "weight": "importance"}
    outcome = same_bits(BASE | {"model": model, "data": data})
    same_inputs = trips | {"inputs": ["age", "city", "start", "born", "day", "zone"]}
    unweighted = run(BASE | {"model": model, "data": {"source": same_inputs, "split": HOLDOUT}})
    assert unweighted.status == "finished", unweighted.error
    assert unweighted.receipt.weights_sha256 != outcome.receipt.weights_sha256
    info = json.loads((outcome.paths.model / "model.json").read_text())
    assert info["classes"] == ["no", "yes"]
    assert info["encoders"]["city"]["categories"] == ["Bonn", "Oslo", "Rome"]
    # New data is encoded as the training data was, although it has another mean and other cities.
    new = pa.table(
        {
            "age": pa.array([40.0, None]),
            "city": ["Rome", "Paris"],
            "start": pa.array([np.datetime64("2024-01-01T12:00:00", "us")] * 2),
            "born": pa.array(np.array(["1990-05-01"] * 2, dtype="datetime64[D]")),
            "day": ["2024-01-02", "2024-01-02"],
            "zone": [1, 2],
        }
    )
    pq.write_table(new, job_dir / "new.parquet")
    from shoal.spec.sources.config import ParquetSourceConfig

    spec = ParquetSourceConfig.model_validate(trips | {"path": "new.parquet", "target": None})
    fitted = Fitted.of_model(info)
    batch = open_source(spec, base_dir=str(job_dir), fitted=fitted).take(np.arange(2))
    row = batch.inputs[0]
    first, second = (dict(enumerate(one.tolist())) for one in row)
    assert row.shape[1] == 14  # age, its flag, three cities, six of the calendar, born, day, zone
    assert (first[0], first[1]) == (40.0, 0.0)
    assert second[0] == pytest.approx(fitted.encoders["age"].mean)
    assert second[1] == 1.0
    assert [first[i] for i in (2, 3, 4)] == [0.0, 0.0, 1.0]
    assert [second[i] for i in (2, 3, 4)] == [0.0, 0.0, 0.0]
    assert (first[12], second[13]) == (2.0, 2.0)
    assert torch.isfinite(shoal.load(outcome.paths.root)(row)).all()


@pytest.mark.compat_row("WebDataset tar shards", "works", how="`source: {kind: webdataset, inputs: png, target: cls}`")
def test_tar_shards(same_bits, job_dir):
    pillow = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for shard in range(3):
        with tarfile.open(job_dir / f"shard-{shard:03}.tar", "w") as tar:
            for i in range(30):
                png = io.BytesIO()
                pillow.fromarray(rng.integers(0, 255, (8, 8), dtype=np.uint8)).save(png, "PNG")
                for name, content in (("png", png.getvalue()), ("cls", str(i % 10).encode())):
                    member = tarfile.TarInfo(f"{shard}-{i:04}.{name}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    source = {"kind": "webdataset", "path": "shard-*.tar", "inputs": "png", "target": "cls", "channels": 1}
    data = {"source": source, "split": HOLDOUT, "transform": "user_data.py:flat"}
    same_bits(BASE | {"data": data})


@pytest.mark.compat_row("class-balanced sampling", "works", how="`sampler: weighted`")
def test_classes_drawn_equally_often(same_bits):
    same_bits(BASE | {"data": MLP["data"] | {"sampler": "weighted"}})


@pytest.mark.compat_row("augmentations by name", "works", how="`augment: [RandomHorizontalFlip, ...]`")
def test_augmentations_by_name(same_bits):
    named = [
        "RandomHorizontalFlip",
        "RandomVerticalFlip",
        {"name": "RandomCrop", "args": {"size": 8, "padding": 1}},
        {"name": "RandomRotation", "args": {"degrees": 10}},
        {"name": "ColorJitter", "args": {"brightness": 0.2, "contrast": 0.2, "max_value": 16}},
        "RandomErasing",
        {"name": "MixUp", "args": {"alpha": 0.2, "num_classes": 10}},
        {"name": "CutMix", "args": {"num_classes": 10}},
    ]
    data = MLP["data"] | {"augment": named, "transform": "models.py:as_image"}
    same_bits(BASE | {"model": {"name": "models.py:cnn"}, "data": data})


@pytest.mark.compat_row("augmentations by name", "works", how="`augment: [RandomHorizontalFlip, ...]`")
def test_augmentations_of_colours(same_bits):
    """Hue and saturation are for three channels."""
    colours = {"saturation": 0.4, "hue": 0.2, "max_value": 16}
    augment = [{"name": "ColorJitter", "args": colours}, "RandomHorizontalFlip"]
    data = MLP["data"] | {"augment": augment, "transform": "models.py:as_colours"}
    same_bits(BASE | {"model": {"name": "models.py:cnn", "args": {"channels": 3}}, "data": data})


@pytest.mark.compat_row("augmentations of series, tokens and tables", "works", how="`augment: [Jitter, ...]`")
@pytest.mark.parametrize("names", [["Jitter", "Scaling", "WindowSlice"], ["GaussianNoise", "SwapNoise"]])
def test_augmentations_of_rows(same_bits, names):
    same_bits(BASE | {"data": MLP["data"] | {"augment": names}})


@pytest.mark.compat_row("augmentations of series, tokens and tables", "works", how="`augment: [Jitter, ...]`")
def test_augmentations_of_tokens(same_bits):
    from tests.conftest import GPT

    augment = [{"name": "TokenDropout", "args": {"p": 0.2}}]
    same_bits(GPT | {"steps": 12, "evaluate": {"every_steps": 6}, "data": GPT["data"] | {"augment": augment}})


@pytest.mark.compat_row("split by similarity", "works", how="`clusters:` on columns, inputs, features or a model")
@pytest.mark.parametrize(
    ("clusters", "split"),
    [
        ({"count": 8}, HOLDOUT | {"group": "cluster"}),
        ({"count": 8, "features": "user_data.py:Features"}, HOLDOUT | {"stratify": "cluster"}),
        ({"distance": 0.5, "by": "target", "scale": False}, HOLDOUT | {"group": "cluster"}),
    ],
)
def test_clusters(same_bits, clusters, split):
    same_bits(BASE | {"data": MLP["data"] | {"clusters": clusters, "split": split}})
