"""What is judged is the file: from the command line to the replay, with a file that is wrong, and other forms of it."""

import hashlib
import json
import sys

import pytest
import torch

from shoal import api, cli
from shoal.compression.onnx_files import OnnxModel
from shoal.jobs.compression.workshop import Workshop
from shoal.jobs.fork_servers import ForkServerPool
from shoal.spec.compression.measured import read_recipe, read_report
from tests.jobs.compression.conftest import PARENT, digests

for library in ("onnx", "onnxscript", "onnxruntime", "torch_pruning"):
    pytest.importorskip(library, reason="the extra compress is not installed")
pytestmark = pytest.mark.long
WIDE = {"name": "compressible.py:half_dead", "args": {"inputs": 64, "classes": 10, "hidden": 2048}}


@pytest.fixture
def command(job_dir, fork_server, monkeypatch, capsys):
    def go(*words):
        monkeypatch.chdir(job_dir)
        monkeypatch.setattr(ForkServerPool, "get", lambda *_, **__: fork_server)
        monkeypatch.setattr(sys, "argv", ["shoal", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as left:
            code = left.code
        return code, capsys.readouterr()

    return go


def test_both_targets_from_the_command_line_to_the_replay(run, command, job_dir):
    """Decisions that used a latency stand in the recipe: whoever replays it decides nothing."""
    tune = {"epochs": 1, "teacher": False, "scratch": False}
    parent = run(PARENT | {"model": WIDE, "compress": {"steps": ["lossless", "int8", "prune", "pack"], "tune": tune}})
    before = digests(parent.paths.root)
    asked = ("--target", "size<40%", "--target", "latency<80%", "--max-drop", "10%", "--json")
    code, printed = command("compress", parent.paths.name, *asked)
    made = job_dir / "runs" / json.loads(printed.out)["run"]
    report, recipe = read_report(made / "compression.json"), read_recipe(made / "recipe.json")
    assert code == (0 if report.targets_met else 6)
    assert digests(parent.paths.root) == before
    rows = {row.name: row for row in report.rungs}
    chosen = rows[report.chosen]
    assert chosen.kept
    assert recipe.steps == chosen.steps != []
    assert recipe.artefact_sha256 == hashlib.sha256((made / "model" / recipe.artefact).read_bytes()).hexdigest()
    if report.targets_met:
        assert chosen.size_ratio < 0.4
        assert all(ratio.median < 0.8 for ratio in chosen.latency.ratios.values())
    else:
        assert rows["pack"].why == "it makes nothing faster, and a latency is asked for"
    measured = [row for row in report.rungs if row.latency and row.name != "parent"]
    assert measured
    assert all(set(row.latency.eager) == {1, 64} for row in measured)

    code, printed = command("compress", parent.paths.name, "--replay", made / "recipe.json", "--json")
    assert code == 0
    again = job_dir / "runs" / json.loads(printed.out)["run"]
    assert read_recipe(again / "recipe.json") == recipe
    files = [one / "model" / recipe.artefact for one in (made, again)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_file_that_is_wrong_loses(run, compressed, monkeypatch):
    """Scales of weights change on disk after it was written: the weights that it was made from are good."""
    import onnx

    take = Workshop.take

    def take_and_damage(self, candidate, step):
        made = take(self, candidate, step)
        if getattr(step, "bits", 0) == 8:
            model = onnx.load(made.artefact.path)
            scales = [one for one in model.graph.initializer if one.data_type == onnx.TensorProto.FLOAT and one.dims]
            for one in scales:
                values = onnx.numpy_helper.to_array(one).copy()
                values[::2] *= 30
                one.CopyFrom(onnx.numpy_helper.from_array(values, one.name))
            assert scales
            onnx.save(model, made.artefact.path)
        return made

    parent = run(PARENT, steps=200)
    tune = {"epochs": 1, "lr": 0.1, "teacher": False}
    made = compressed(parent, steps=["int8"], max_drop="10%", tune=tune)
    assert made.report.chosen == "int8"
    monkeypatch.setattr(Workshop, "take", take_and_damage)
    made = compressed(parent, steps=["int8"], max_drop="10%", tune=tune)
    rows = {row.name: row for row in made.report.rungs}
    for name in ("int8", "int8 with training"):
        assert not rows[name].kept
        assert rows[name].quality.drop > 0.1
        assert "the drop may be" in rows[name].why
    assert made.report.chosen == "parent"


def test_an_export_has_the_weights_before_rounding(run, compressed, command, job_dir):
    """As `shoal.load` has them. The judged file is `model.onnx` of the result."""
    made = compressed(run(PARENT, steps=200), steps=["lossless", "int8"], max_drop="20%")
    assert made.report.chosen == "lossless + int8"
    judged = made.paths.model / "model.onnx"
    code, printed = command("export", made.paths.name, "--format", "onnx", "--out", "exported.onnx")
    assert code == 0, printed.err
    x = torch.rand(9, 64) * 16
    with torch.no_grad():
        loaded, exported, rounded = (
            api.load(made.paths.root)(x),
            OnnxModel(job_dir / "exported.onnx")(x),
            OnnxModel(judged)(x),
        )
    assert torch.allclose(exported, loaded, atol=1e-4)
    assert (rounded - loaded).abs().max() > 1e-3
    assert (job_dir / "exported.onnx").stat().st_size > judged.stat().st_size
