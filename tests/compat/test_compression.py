"""Compression of models from other libraries."""

import copy

import pytest
import torch

from shoal import api
from shoal.checkpoint.store import CheckpointStore
from shoal.compression.dependency import find_groups
from shoal.compression.importance import by_magnitude, cut_least
from shoal.compression.shape import apply_steps, count_parameters, dense_steps
from shoal.errors import ShoalError
from shoal.jobs.compression.compress import CompressRequest, compress, replay
from shoal.spec.compression.config import CompressConfig
from shoal.spec.compression.measured import read_recipe
from shoal.spec.compression.steps import DenseStep
from shoal.spec.job import WorkersConfig
from shoal.spec.load import load_run_job
from shoal.spec.run_paths import RunPaths
from tests.compat.test_hugging_face import BERT, GPT

pytestmark = pytest.mark.compat
TOKENS = torch.randint(0, 200, (2, 12), generator=torch.Generator().manual_seed(0))
WHOLE = {"steps": ["int8", "prune", "low_bits", "pack"], "max_drop": "95%", "tune": {"epochs": 1, "scratch": False}}


@pytest.fixture
def compressed(job_dir, fork_server):
    def go(parent, config, workers):
        request = CompressRequest(
            parent.paths, job_dir / "runs", workers=WorkersConfig(least=workers, most=workers), show=print
        )
        return compress(request, CompressConfig.model_validate(config), fork_server=fork_server)

    return go


@pytest.fixture
def gpt(job_dir, monkeypatch):
    monkeypatch.syspath_prepend(str(job_dir))
    import hf

    torch.manual_seed(0)
    return hf.gpt().eval()


def test_a_transposed_layer_becomes_a_dense_one(gpt):
    """GPT-2's Conv1D: the same numbers, and heads and neurons that can be cut."""
    steps = dense_steps(gpt)
    names = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    assert steps == [DenseStep(layers=[f"transformer.h.{i}.{name}" for i in (0, 1) for name in names])]
    dense = apply_steps(copy.deepcopy(gpt), steps)
    assert dense_steps(dense) == []
    with torch.no_grad():
        assert torch.allclose(dense(TOKENS).logits, gpt(TOKENS).logits, atol=1e-6)
    assert torch.equal(dense.transformer.h[1].mlp.c_fc.weight, gpt.transformer.h[1].mlp.c_fc.weight.T)
    with pytest.raises(ShoalError, match="a LayerNorm has no transposed weight"):
        apply_steps(dense, [DenseStep(layers=["transformer.ln_f"])])

    groups = find_groups(dense, (TOKENS,))
    assert {one.name.removeprefix("transformer.h."): (one.kind, one.channels) for one in groups.found} == {
        f"{i}.{name}": kind
        for i in (0, 1)
        for name, kind in (("attn.c_attn", ("filled", 2)), ("mlp.c_fc", ("channels", 128)))
    }
    small = apply_steps(copy.deepcopy(dense), [cut_least(groups.found, by_magnitude(dense, groups.found), remove=0.5)])
    assert small(TOKENS).logits.shape == (2, 12, 200)
    assert small.transformer.h[0].mlp.c_fc.weight.shape == (64, 32)
    assert count_parameters(small) < 0.8 * count_parameters(gpt)


@pytest.mark.compat("`shoal compress` of GPT-2 (`Conv1D`, tied weights)", "works", how="its own loss, or any other")
def test_gpt_from_the_run_to_the_replay(run, compressed, job_dir, fork_server):
    """Every rung on a model with transposed layers: the same files on one worker and on two, and again."""
    parent = run(GPT, best={"metric": "loss"}, lanes=2)
    made, other = (compressed(parent, WHOLE, workers) for workers in (1, 2))
    rungs = {row.name: row for row in made.report.rungs}
    assert not [row.why for row in rungs.values() if "SH" in row.why]
    for name in ("int8", "prune 25%, tuned", "4 bits"):
        found = next(row for row in rungs.values() if name in row.name)
        assert found.kept, (found.name, found.why)
        assert found.steps[0].kind == "dense"
    cut = next(step for row in rungs.values() for step in row.steps if step.kind == "cut")
    assert {name.rpartition(".")[2] for name in cut.layers} == {"c_attn", "c_proj", "c_fc"}
    assert any("of the weights" in name for name in rungs)
    recipes = [read_recipe(one.paths.root / "recipe.json") for one in (made, other)]
    assert recipes[0] == recipes[1]
    again = replay(CompressRequest(parent.paths, job_dir / "runs"), recipes[0], fork_server=fork_server)
    files = [one.paths.model / recipes[0].artefact for one in (made, other, again)]
    assert len({file.read_bytes() for file in files}) == 1
    assert api.load(made.paths.root)(TOKENS).logits.shape == (2, 12, 200)


@pytest.mark.compat("`shoal compress` of Llama", "works", how="int8, heads and neurons")
def test_llama_from_the_run_to_the_replay(run, compressed, job_dir, fork_server):
    """Rotated positions and gated neurons: 8 bits, and half of the heads and neurons."""
    parent = run(GPT | {"name": "llama", "model": "hf.py:llama", "metrics": []}, best={"metric": "loss"}, lanes=2)
    tune = {"epochs": 1, "scratch": False, "teacher": False}
    made = compressed(parent, WHOLE | {"steps": ["int8", "prune"], "tune": tune}, 2)
    rungs = {row.name: row for row in made.report.rungs}
    assert not [row.why for row in rungs.values() if "SH" in row.why]
    assert rungs["int8"].kept
    assert rungs["runtime: onnx float32"].quality.drop == pytest.approx(0.0, abs=1e-5)
    cut = next(step for step in rungs["prune 50%, tuned"].steps if step.kind == "cut")
    assert {name.rpartition(".")[2] for name in cut.layers} >= {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    recipe = read_recipe(made.paths.root / "recipe.json")
    again = replay(CompressRequest(parent.paths, job_dir / "runs"), recipe, fork_server=fork_server)
    assert (again.paths.model / recipe.artefact).read_bytes() == (made.paths.model / recipe.artefact).read_bytes()
    assert api.load(made.paths.root)(TOKENS).logits.shape == (2, 12, 200)


@pytest.mark.compat("`shoal compress` of BERT with its own loss", "works", how="int8, heads and neurons, a teacher")
def test_bert_with_its_own_loss_is_compressed(run, compressed):
    parent = run(BERT, best={"metric": "accuracy"}, lanes=2)
    made = compressed(parent, WHOLE | {"steps": ["int8", "prune"]}, 2)
    rungs = {row.name: row for row in made.report.rungs}
    assert not [row.why for row in rungs.values() if "SH" in row.why]
    assert rungs["int8"].kept
    assert rungs["int8"].quality.samples == 40
    assert set(rungs["int8"].latency.ratios) == {1, 64}
    runtime = rungs["runtime: onnx float32"]
    assert runtime.artefact.difference < 1e-4
    assert runtime.quality.changed == 0
    assert {"prune 25%, tuned", "prune 25%, with teacher"} <= set(rungs)


@pytest.mark.compat("`shrink` of GPT-2", "works", how="momenta are transposed and cut like the weights")
def test_gpt_shrinks_while_it_trains(run, job_dir):
    job = GPT | {"shrink": {"at": "50%", "keep": "50%"}, "best": {"metric": "loss"}, "lanes": 2}
    one, two = run(job), run(job, workers=2, runs="other")
    assert (one.status, one.run) == ("finished", "gpt-shrunk-1"), one.error
    assert one.receipt.weights_sha256 == two.receipt.weights_sha256
    assert [step.kind for step in load_run_job(one.paths.job).shape.steps] == ["dense", "cut"]
    first = RunPaths.at(job_dir / "runs" / "gpt-1")
    stores = [CheckpointStore(paths.checkpoints, job_sha256=None) for paths in (first, one.paths)]
    whole, cut = (store.load(6)[1] for store in stores)
    name = "transformer.h.0.mlp.c_fc.weight"
    number = [key for key in whole["model"] if key != "lm_head.weight"].index(name)
    old, new = (state["optimizer"]["state"][number]["exp_avg"] for state in (whole, cut))
    assert (old.shape, new.shape) == ((32, 128), (64, 32))
    rows = [row for row in new if not any(torch.equal(row, other) for other in old.T)]
    assert not rows  # each row was a column
