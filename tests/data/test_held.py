"""Data that a fork server holds for its workers: the same arrays and ids, as long as the files are the same."""

import json
import os

import numpy as np
import pytest

from shoal.data import datasets
from shoal.data.datasets import hold, open_datasets
from shoal.data.held import HELD, MAX_HELD, key_of
from shoal.spec.data import DataConfig


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "rows.npz", x=rng.random((40, 3), np.float32), y=rng.integers(0, 2, 40))
    yield {"source": {"kind": "npz", "path": "rows.npz"}, "split": {"kind": "holdout", "validation": 0.25}}
    HELD.clear()


def open_(data, tmp_path, *, seed=0, notify=lambda note: None):
    return open_datasets(
        DataConfig.model_validate(data), seed=seed, base_dir=str(tmp_path), cache_dir=tmp_path, notify=notify
    )


def hold_(data, tmp_path, *, seed=0):
    hold(json.dumps({"data": data, "seed": seed, "base_dir": str(tmp_path), "cache_dir": str(tmp_path)}))


def test_what_is_held_is_what_would_be_opened(data, tmp_path, monkeypatch):
    fresh, told = open_(data, tmp_path), []
    leaky = data | {"split": {"kind": "holdout", "validation": 0.25}, "leaks": "warn"}
    hold_(leaky, tmp_path)
    monkeypatch.setattr(datasets, "open_source", None)  # nothing may be opened now
    held = open_(leaky, tmp_path, notify=told.append)
    for part in ("train", "validation"):
        one, other = (d.train if part == "train" else d.held_out[part] for d in (fresh, held))
        assert np.array_equal(one.ids, other.ids)
        assert (one.source.take(one.ids).inputs[0] == other.source.take(other.ids).inputs[0]).all()
    assert held.train.source is open_(leaky, tmp_path).train.source


def test_another_seed_or_a_changed_file_is_opened_again(data, tmp_path):
    hold_(data, tmp_path)
    held = open_(data, tmp_path)
    assert open_(data, tmp_path, seed=1).train.source is not held.train.source
    os.utime(tmp_path / "rows.npz", ns=(1, 1))
    assert open_(data, tmp_path).train.source is not held.train.source


def test_data_with_clusters_is_not_held(data, tmp_path):
    clustered = data | {"split": data["split"] | {"group": "cluster"}, "clusters": {"count": 5}}
    hold_(clustered, tmp_path)
    assert not HELD
    assert open_(clustered, tmp_path).columns is not None


def test_leaks_are_told_again(data, tmp_path):
    x = np.ones((40, 3), np.float32)
    np.savez(tmp_path / "rows.npz", x=x, y=np.zeros(40, np.int64))
    fresh, held = [], []
    open_(data, tmp_path, notify=fresh.append)
    hold_(data, tmp_path)
    open_(data, tmp_path, notify=held.append)
    assert fresh == held
    assert any("leak" in note for note in fresh)


def test_the_users_code_and_unknown_files_are_never_held(data, tmp_path):
    def key(**changes):
        return key_of(DataConfig.model_validate(data | changes), seed=0, base_dir=str(tmp_path))

    assert key()
    assert not key(source={"kind": "npz", "path": "missing.npz"})
    assert not key(source={"kind": "npz", "path": "https://example.org/rows.npz"})
    assert not key(source={"kind": "python", "factory": "data.py:Rows"})
    for seed in range(MAX_HELD + 2):
        hold_(data, tmp_path, seed=seed)
    assert len(HELD) == MAX_HELD
