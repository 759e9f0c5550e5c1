from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
from torch import nn

from shoal.checkpoint.export import export_model, load_weights
from shoal.checkpoint.sha256 import weights_sha256
from shoal.checkpoint.store import CheckpointStore
from shoal.errors import CheckpointError

from .states import EventRecorder, bit_equal


class Tied(nn.Module):
    """Shares a weight, has a buffer, and a layer that trains otherwise than the rest."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.drop(self.norm(self.embed(x))))


class Branching(nn.Module):
    """torch.export cannot follow a branch on the data."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else x


class Remembering(Branching):
    """Has state that is not a tensor."""

    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, state):
        pass


def export(directory, model, inputs=None, *, program=False, recorder=None):
    recorder = recorder or EventRecorder()
    return export_model(
        directory, model, info={"model": "x:Tied"}, example_inputs=inputs, program=program, emit=recorder
    )


def test_weights_are_written_whole_and_described(tmp_path):
    model = Tied()
    content = export(tmp_path, model)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.json", "model.safetensors"]
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert Tied().load_state_dict(weights).missing_keys == []
    assert all(bit_equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert content == json.loads((tmp_path / "model.json").read_text())
    assert content["weights_sha256"] == weights_sha256(model.state_dict())
    assert content["model"] == "x:Tied"
    assert content["tensors"]["norm.running_var"] == {"dtype": "float32", "shape": [4]}
    assert content["program"] is None
    assert content["versions"]["torch"] == torch.__version__


def test_the_program_runs_with_any_batch_and_leaves_the_model_as_it_was(tmp_path):
    model, recorder = Tied(), EventRecorder()
    model.norm.eval()
    content = export(tmp_path, model, (torch.tensor([0, 1, 2]),), program=True, recorder=recorder)
    assert recorder.events == []
    assert content["program"] == "model.pt2"
    assert (model.training, model.drop.training, model.norm.training) == (True, True, False)
    program = torch.export.load(tmp_path / "model.pt2").module()
    batch = torch.tensor([4, 3, 2, 1, 0, 1, 2])
    assert torch.equal(program(batch), model.eval()(batch))


@pytest.mark.parametrize("inputs", [(torch.ones(3, 2),), None, ("text",)])
def test_a_model_that_cannot_be_a_program_is_told_and_no_failure(tmp_path, inputs):
    recorder = EventRecorder()
    (tmp_path / "model.pt2").write_text("of an earlier model")
    content = export(tmp_path, Branching(), inputs, program=True, recorder=recorder)
    ((kind, row),) = recorder.events
    assert (kind, row["what"]) == ("export_skipped", "model.pt2")
    assert row["reason"]
    assert "\n" not in row["reason"]
    assert content["program"] is None
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.json", "model.safetensors"]


def test_what_is_not_a_tensor_is_left_out_and_told(tmp_path):
    recorder = EventRecorder()
    assert export(tmp_path, Remembering(), recorder=recorder)["left_out"] == ["_extra_state"]
    assert recorder.of_kind("export_skipped")


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="SH503"):
        export(tmp_path / "file" / "model", Tied())


# ---- weights from whatever holds some ----


@pytest.fixture
def run(tmp_path):
    """A run's directory with checkpoints at steps 1 and 2."""
    store = CheckpointStore(tmp_path / "checkpoints", job_sha256="job")
    for step in (1, 2):
        model = {"w": torch.full((3,), float(step)), "big": torch.full((20_000,), float(step))}
        store.save(step, {"model": model, "optimizer": {0: torch.ones(30_000)}})
    store.close()
    return tmp_path


def test_weights_of_a_run_that_is_not_finished(run):
    assert load_weights(run)["w"].tolist() == [2, 2, 2]
    assert load_weights(run / "checkpoints")["big"].sum() == 40_000
    manifest = run / "checkpoints" / "manifests" / f"{1:012d}.json"
    assert sorted(load_weights(manifest)) == ["big", "w"]
    assert load_weights(str(manifest))["w"].tolist() == [1, 1, 1]


def test_weights_of_a_damaged_checkpoint(run):
    manifest = run / "checkpoints" / "manifests" / f"{2:012d}.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    assert load_weights(run)["w"].tolist() == [1, 1, 1]
    with pytest.raises(CheckpointError, match="SH502"):
        load_weights(manifest)


def test_weights_of_a_finished_run(run):
    model = Tied()
    export(run / "model", model)
    for path in (run, run / "model", run / "model" / "model.safetensors"):
        loaded = load_weights(path)
        assert weights_sha256(loaded) == weights_sha256(model.state_dict())
    loaded["norm.weight"].zero_()
    assert load_weights(run)["norm.weight"].sum() == 4  # the file is not the tensor's memory


def test_weights_behind_a_url():
    import fsspec

    with fsspec.open("memory://weights/a.safetensors", "wb") as file:
        file.write(safetensors.torch.save({"w": torch.ones(2)}))
    assert load_weights("memory://weights/a.safetensors")["w"].sum() == 2
    with pytest.raises(CheckpointError, match="SH501"):
        load_weights("memory://weights/none.safetensors")


def test_what_holds_no_weights(run, tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 100)
    (tmp_path / "b.pt").write_text("hello")
    (tmp_path / "empty").mkdir()
    for path, code in [("a.safetensors", "SH505"), ("b.pt", "SH505"), ("empty", "SH501"), ("none", "SH501")]:
        with pytest.raises(CheckpointError) as caught:
            load_weights(tmp_path / path)
        assert caught.value.code == code, path
    other = CheckpointStore(run / "checkpoints", job_sha256="job", name="fold-1")
    other.save(5, {"weights": torch.ones(2)})
    other.close()
    with pytest.raises(CheckpointError, match="several runs share this store: fold-1, manifests"):
        load_weights(run)
    with pytest.raises(CheckpointError, match="no section 'model'"):
        load_weights(run / "checkpoints" / "fold-1" / f"{5:012d}.json")
