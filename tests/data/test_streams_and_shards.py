"""Streams, collate functions and tar shards."""

import io
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.data.samplers import make_sampler
from shoal.errors import ShoalError
from shoal.spec.data import BalancedSamplerConfig, RandomSamplerConfig, WeightedSamplerConfig
from tests.data.source_helpers import open_failure, open_spec

CODE = Path(__file__).parents[1] / "fixtures" / "user_data.py"


@pytest.fixture
def opened(tmp_path):
    shutil.copy(CODE, tmp_path)

    def go(name, **spec):
        args = spec.pop("args", {})
        return open_spec(tmp_path, kind="python", factory={"name": f"user_data.py:{name}", "args": args}, **spec)

    return go


def sampler_of(source, config=None, lanes=3, batch_size=8):
    ids = np.arange(len(source), dtype=np.int64)
    return make_sampler(config or RandomSamplerConfig(), ids=ids, lanes=lanes, batch_size=batch_size, seed=1,
                        source=source)  # fmt: skip


@pytest.mark.parametrize("name", ["Numbers", "SkippingNumbers"])
def test_a_stream_gives_every_sample_once_from_any_step_on(opened, name):
    source = opened(name, window=10, args={"count": 53})
    sampler = sampler_of(source)
    assert len(source) == 53
    expected = opened(name, window=10, args={"count": 53})
    steps = [[sampler.ids(step, lane) for lane in range(3)] for step in range(2 * sampler.steps_per_epoch)]
    for epoch in range(2):
        used = np.concatenate([ids for step in steps[7 * epoch : 7 * epoch + 7] for ids in step])
        assert sorted(used.tolist()) == list(range(53))
        assert used.tolist() != sorted(used.tolist())
    for start in (0, 4, 9):  # a worker that starts later, and one that goes back
        for step in steps[start:]:
            for ids in step:
                if len(ids):
                    assert torch.equal(source.take(ids).inputs[0], torch.stack([x_of(i) for i in ids]))
    assert torch.equal(expected.take(np.array([50, 3])).inputs[0], torch.stack([x_of(50), x_of(3)]))


def x_of(i):
    return torch.sin(torch.arange(6) * (float(i) + 1.0))


def test_windows_of_a_stream_are_read_in_order(opened):
    sampler = sampler_of(opened("Numbers", window=10))
    order = np.concatenate([sampler.ids(step, lane) for step in range(sampler.steps_per_epoch) for lane in range(3)])
    assert (np.abs(order - np.arange(100)) < 10).all()


def test_a_stream_that_ends_early(tmp_path, opened):
    source = opened("Numbers", length=200)
    problem = open_failure_of(source)
    assert problem.code == "SH835"
    assert "after 100 samples" in str(problem)


def test_a_stream_that_fails_names_its_sample_and_its_line(opened):
    problem = open_failure_of(opened("BrokenNumbers", length=200), 40)
    assert problem.code == "SH309"
    assert "sample 30 of the stream: ValueError: a torn page" in str(problem)
    assert "user_data.py:" in problem.where


def open_failure_of(source, sample=150):
    with pytest.raises(ShoalError) as caught:
        source.take(np.array([sample]))
    return caught.value


def test_a_stream_is_not_drawn_by_weight(opened):
    with pytest.raises(ShoalError) as caught:
        sampler_of(opened("Numbers"), WeightedSamplerConfig(kind="weighted"))
    assert caught.value.code == "SH355"


def test_a_collate_function_pads_each_lane_and_lengths_balance_lanes(opened):
    source = opened("Sequences", collate={"name": "user_data.py:pad", "args": {"fill": 7}})
    sampler = sampler_of(source, BalancedSamplerConfig(kind="balanced"), batch_size=30)
    batches = [source.take(sampler.ids(0, lane)) for lane in range(3)]
    sums = [int(batch.inputs[1].sum()) for batch in batches]
    assert max(sums) - min(sums) <= 20
    for batch in batches:
        tokens, lengths = batch.inputs
        assert tokens.shape == (batch.size, int(lengths.max()))
        assert (tokens[0, int(lengths[0]) :] == 7).all()
        assert len(batch.target) == batch.size


def test_a_collate_function_that_fails_names_its_line(tmp_path, opened):
    opened("Sequences")
    problem = open_failure(tmp_path, kind="python", factory="user_data.py:Sequences", collate="user_data.py:bad_pad")
    assert problem.code == "SH830"
    assert "no such fill" in str(problem)
    assert "user_data.py" in str(problem)


def test_a_collate_function_that_drops_samples_is_refused(opened):
    source = opened("Sequences", collate="user_data.py:drop_short")
    with pytest.raises(ShoalError) as caught:
        source.take(np.arange(40))
    assert caught.value.code == "SH830"
    assert "drops samples" in caught.value.message


@pytest.mark.parametrize("collate", ["join", "time_first", "pairs"])
def test_targets_of_other_shapes_are_no_dropped_samples(opened, collate):
    batch = opened("Sequences", collate=f"user_data.py:{collate}").take(np.arange(40))
    assert batch.size == 40


# ---- tar shards ----


def write_shard(path, samples):
    with tarfile.open(path, "w") as tar:
        for name, content in samples:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def npy(values):
    content = io.BytesIO()
    np.save(content, np.asarray(values))
    return content.getvalue()


@pytest.fixture
def shards(tmp_path):
    for shard in range(2):
        files = []
        for i in range(3):
            key = f"data/{shard}{i}"
            files += [(f"{key}.x.npy", npy([shard, i, 0.5])), (f"{key}.cls", str(i).encode()),
                      (f"{key}.txt", b"even" if i % 2 == 0 else b"odd"), (f"{key}.json", b"[1, 2]")]  # fmt: skip
        write_shard(tmp_path / f"s-{shard}.tar", files)
    return {"kind": "webdataset", "path": "s-*.tar"}


def test_samples_of_shards_in_any_order(tmp_path, shards):
    source = open_spec(tmp_path, **shards, inputs=["x.npy", "json"], target="cls")
    batch = source.take(np.array([5, 0, 4]))
    assert batch.inputs[0].tolist() == [[1, 2, 0.5], [0, 0, 0.5], [1, 1, 0.5]]
    assert batch.inputs[0].dtype == torch.float32
    assert batch.inputs[1].tolist() == [[1, 2]] * 3
    assert batch.target.tolist() == [2, 0, 1]
    assert source.column("key").tolist() == [f"data/{s}{i}" for s in range(2) for i in range(3)]
    assert source.column("shard").tolist() == [0, 0, 0, 1, 1, 1]


def test_texts_of_shards_are_classes(tmp_path, shards):
    source = open_spec(tmp_path, **shards, inputs="x.npy", target="txt")
    assert source.classes == ("even", "odd")
    assert source.targets().tolist() == [0, 1, 0] * 2
    write_shard(tmp_path / "new.tar", [("a.x.npy", npy([1.0])), ("a.txt", b"other")])
    new = shards | {"path": "new.tar", "inputs": "x.npy", "target": "txt"}
    assert open_failure(tmp_path, **new, training_source=source).code == "SH310"


@pytest.mark.parametrize(
    ("inputs", "code", "says"),
    [("jpg", "SH303", "no file '.jpg'"), ("pyd", "SH834", "Pickles"), ("y.npy", "SH303", "y.npy")],
)
def test_files_that_are_not_there_or_not_read(tmp_path, shards, inputs, code, says):
    pytest.importorskip("PIL")
    problem = open_failure(tmp_path, **shards, inputs=inputs)
    assert problem.code == code
    assert says in str(problem) + problem.fix


def test_a_shard_that_is_cut_off(tmp_path, shards):
    (tmp_path / "s-1.tar").write_bytes(b"not a tar file at all")
    assert open_failure(tmp_path, **shards, inputs="cls").code == "SH834"


def test_incomplete_samples_are_skipped_if_they_may(tmp_path):
    write_shard(tmp_path / "t.tar", [("a.cls", b"1"), ("b.txt", b"x"), ("c.cls", b"2")])
    source = open_spec(tmp_path, kind="webdataset", path="t.tar", inputs="cls", on_bad_row="skip")
    assert source.skipped_rows == 1
    assert source.take(np.array([1])).inputs[0].tolist() == [2]
