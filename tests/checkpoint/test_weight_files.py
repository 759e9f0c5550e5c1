"""The files that hold weights: what is sent to another machine can be loaded there, and nothing more is sent."""

import shutil

import pytest
import torch

from shoal.checkpoint.export import load_weights
from shoal.checkpoint.store import CheckpointStore
from shoal.checkpoint.weight_files import find_weight_files
from shoal.errors import ShoalError


def sent(found, target):
    for name in found.names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(found.root / name, target / name)
    return load_weights(target / found.given)


@pytest.fixture
def store(tmp_path):
    made = CheckpointStore(tmp_path / "run" / "checkpoints", job_sha256="a" * 64)
    for step in (1, 2):
        made.save(step, {"model": {"w": torch.full((4,), float(step))}})
    made.wait()
    return tmp_path / "run"


def test_of_a_run_without_a_model_the_newest_checkpoint_is_sent(store, tmp_path):
    found = find_weight_files(store)
    assert sent(found, tmp_path / "there")["w"].tolist() == [2.0] * 4
    assert len(found.names) < sum(file.is_file() for file in (store / "checkpoints").rglob("*"))


def test_a_manifest_names_its_own_step(store, tmp_path):
    first = min((store / "checkpoints").glob("*/*.json"))
    assert sent(find_weight_files(first), tmp_path / "there")["w"].tolist() == [1.0] * 4


def test_a_model_comes_before_checkpoints(store, tmp_path):
    (store / "model").mkdir()
    (store / "model" / "model.safetensors").write_bytes(b"x")
    assert find_weight_files(store).names == ["model.safetensors"]
    assert find_weight_files(store / "model" / "model.safetensors").names == ["model.safetensors"]


@pytest.mark.parametrize("name", ["", "missing", "checkpoints"])
def test_where_there_is_nothing_to_load_it_is_told(tmp_path, name):
    (tmp_path / "checkpoints" / "blobs").mkdir(parents=True) if name == "checkpoints" else None
    with pytest.raises(ShoalError, match="SH501"):
        find_weight_files(tmp_path / name)
