"""The whole ladder on real runs with real runtimes: the same bytes on one worker, and on two through a kill."""

import hashlib

import pytest
import torch

from shoal import api
from shoal.jobs.compression.compress import CompressRequest, replay
from shoal.jobs.compression.workshop import Workshop
from shoal.spec.compression.measured import read_recipe
from shoal.spec.compression.steps import MaskStep, TuneStep, ZeroStep
from shoal.spec.job import WorkersConfig
from shoal.spec.load import load_run_job
from tests.conftest import CNN, GPT
from tests.jobs.compression.conftest import PARENT

for library in ("onnx", "onnxscript", "onnxruntime", "torch_pruning"):
    pytest.importorskip(library, reason="the extra compress is not installed")
pytestmark = pytest.mark.long


@pytest.fixture
def through_a_kill(run, compressed, job_dir, fork_server):
    """A compression on one worker, one on two of which one dies in a training, and the replay give the same file."""

    def go(**asked):
        return _through_a_kill(run, compressed, job_dir, fork_server, asked)

    return go


def _through_a_kill(run, compressed, job_dir, fork_server, asked):
    marks = job_dir / "marks"
    marks.mkdir()
    marks.joinpath("killed-30").touch()  # the parent and the first compression live
    watcher = {"name": "faults.py:KillAt", "args": {"steps": [30], "marks": str(marks)}}
    parent = run(PARENT, steps=200, watchers=[watcher])
    one = compressed(parent, workers=WorkersConfig(least=1, most=1), **asked)
    marks.joinpath("killed-30").unlink()
    two = compressed(parent, workers=WorkersConfig(least=2, most=2), **asked)
    assert marks.joinpath("killed-30").exists(), "a worker died in a tuning run"
    recipes = [read_recipe(made.paths.root / "recipe.json") for made in (one, two)]
    assert recipes[0] == recipes[1]
    assert [(r.name, r.kept) for r in one.report.rungs] == [(r.name, r.kept) for r in two.report.rungs]
    again = replay(CompressRequest(parent.paths, job_dir / "runs"), recipes[0], fork_server=fork_server)
    files = [made.paths.model / recipes[0].artefact for made in (one, two, again)]
    assert len({hashlib.sha256(file.read_bytes()).hexdigest() for file in files}) == 1
    return one


def test_the_ladder_is_the_same_on_one_worker_and_on_two_through_a_kill(through_a_kill):
    one = through_a_kill(target={"size": "20%"}, max_drop="4%", tune={"epochs": 2, "lr": 0.3})
    assert one.report.targets_met
    names = [row.name for row in one.report.rungs]
    assert names[:3] == ["parent", "runtime: onnx float32", "lossless"]
    assert any("from scratch" in name for name in names)
    assert any("with teacher" in name for name in names)
    api.load(one.paths.root)


def test_few_bits_few_weights_and_products_are_the_same_on_one_worker_and_on_two_through_a_kill(through_a_kill):
    one = through_a_kill(steps=["low_bits", "pack", "low_rank"], max_drop="30%", tune={"epochs": 2, "lr": 0.3})
    names = [row.name for row in one.report.rungs]
    assert "2 bits" in names
    assert any(name.endswith("3 bits, packed") for name in names)
    assert "low rank 25%, tuned" in names
    assert one.report.chosen.endswith("packed")


def test_weights_of_few_bits_are_trained_and_packed(run, compressed, job_dir, fork_server):
    parent = run(PARENT, steps=200)
    asked = {"steps": ["low_bits", "pack"], "max_drop": "30%", "tune": {"epochs": 2, "lr": 0.3}}
    made = compressed(parent, **asked, target={"size": "4%"})
    rows = {row.name: row for row in made.report.rungs}
    sizes = [rows[f"{bits} bits"].artefact.size_bytes for bits in (4, 3, 2)]
    assert sizes == sorted(sizes, reverse=True)
    assert all(rows[f"{bits} bits"].kept for bits in (4, 3, 2))
    assert any("of the weights" in name for name in rows)
    recipe = read_recipe(made.paths.root / "recipe.json")
    assert recipe.artefact == "model.packed"
    chosen = rows[made.report.chosen].artefact
    assert chosen.size_bytes == (made.paths.model / "model.packed").stat().st_size
    assert chosen.difference > 0
    again = replay(CompressRequest(parent.paths, job_dir / "runs"), recipe, fork_server=fork_server)
    assert (again.paths.model / "model.packed").read_bytes() == (made.paths.model / "model.packed").read_bytes()


def test_convolutions_are_pruned_and_quantised(run, compressed):
    parent = run(CNN, steps=120, best={"metric": "accuracy"})
    made = compressed(parent, steps=["lossless", "prune", "int8"], max_drop="30%", tune={"epochs": 1, "lr": 1.0})
    rows = {row.name: row for row in made.report.rungs}
    assert rows["lossless"].certificate.difference_points < 1e-9  # batch norms are folded
    assert any(name.startswith("prune 25%") and row.kept for name, row in rows.items())
    kept = [row for row in made.report.rungs if row.name.endswith("int8") and row.artefact]
    assert kept
    assert set(kept[0].latency.ratios) == {1, 64}


def test_a_transformer_loses_heads_and_neurons(run, compressed, job_dir, fork_server):
    parent = run(GPT)
    asked = {"steps": ["prune", "int8"], "max_drop": "90%", "tune": {"epochs": 1, "teacher": False, "scratch": False}}
    made = compressed(parent, **asked)
    row = next(one for one in made.report.rungs if one.name == "prune 50%, tuned")
    assert row.kept
    cut = next(step for step in row.steps if step.kind == "cut")
    assert any(kept.wide or kept.heads or (kept.out and "qkv" in name) for name, kept in cut.layers.items())
    assert any(one.name.endswith("int8") and one.kept for one in made.report.rungs)
    recipe = read_recipe(made.paths.root / "recipe.json")
    again = replay(CompressRequest(parent.paths, job_dir / "runs"), recipe, fork_server=fork_server)
    assert (again.paths.model / recipe.artefact).read_bytes() == (made.paths.model / recipe.artefact).read_bytes()
    api.load(made.paths.root)


def test_tuning_survives_a_kill(run, job_dir, fork_server):
    """The same bytes whether a worker of the tuning run is killed or not."""
    parent = run(PARENT | {"workers": 2})
    found = []
    for kill in (False, True):
        job = parent_job(parent, kill, job_dir)
        workshop = Workshop(job, job_dir / f"work-{kill}", fork_server=fork_server)
        start = workshop.open_parent(str(parent.paths.model))
        pruned, _ = workshop.prune(start, "prune", remove=0.5, importance="taylor")
        zeroed = workshop.take(pruned, ZeroStep(keep={"0": 0.5}))
        made = workshop.tune(zeroed, TuneStep(epochs=2, lr=0.5, teacher=True, hold=MaskStep(layers=["0"])))
        found.append(made.weights.sha256)
        if kill:
            assert (job_dir / "marks" / "killed-7").exists()
    assert found[0] == found[1]


def test_the_program_of_a_result_gives_what_its_weights_give(run, compressed):
    parent = run(PARENT | {"export": ["program"]})
    made = compressed(parent, steps=["lossless"])
    model, x = api.load(made.paths.root), torch.rand(7, 64) * 16
    program = torch.export.load(made.paths.model / "model.pt2").module()
    assert sum(p.numel() for p in program.parameters()) == sum(p.numel() for p in model.parameters())
    assert torch.equal(program(x), model(x))


def parent_job(parent, kill, job_dir):
    job = load_run_job(parent.paths.job)
    if not kill:
        return job
    marks = job_dir / "marks"
    marks.mkdir()
    watcher = {"name": "faults.py:KillAt", "args": {"steps": [7], "marks": str(marks)}}
    return type(job).model_validate(job.dump() | {"watchers": [watcher]})
