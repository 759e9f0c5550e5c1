"""Single rungs from a run to the file on disk: what was decided, what the file holds, and the same bytes again."""

import hashlib

import pytest
import torch
from sklearn.datasets import load_digits

from shoal import api
from shoal.compression.onnx_files import OnnxModel
from shoal.jobs.compression.compress import CompressRequest, replay
from shoal.jobs.compression.workshop import Workshop
from shoal.jobs.probes import run_probe
from shoal.spec.compression.measured import read_recipe
from shoal.spec.compression.steps import parse_indices
from shoal.spec.job import WorkersConfig
from shoal.spec.load import load_run_job
from tests.conftest import GPT
from tests.jobs.compression.conftest import PARENT, accuracy_of_file, digests

UNUSED = "equal on the training samples"
TWO = WorkersConfig(least=2, most=2)
QUICK = {"max_drop": "90%", "tune": {"epochs": 1, "teacher": False, "scratch": False}}


def parent_of(name, **args):
    return PARENT | {"model": {"name": f"compressible.py:{name}", "args": {"inputs": 64, "classes": 10, **args}}}


@pytest.fixture
def replayed(job_dir, fork_server):
    """The file of a compression, which its recipe gives again on one worker."""

    def go(parent, made):
        recipe = read_recipe(made.paths.root / "recipe.json")
        file = made.paths.model / recipe.artefact
        request = CompressRequest(parent.paths, job_dir / "runs", workers=WorkersConfig(least=1, most=1))
        again = replay(request, recipe, fork_server=fork_server)
        assert (again.paths.model / recipe.artefact).read_bytes() == file.read_bytes()
        chosen = next(row for row in made.report.rungs if row.name == made.report.chosen)
        assert chosen.artefact.size_bytes == file.stat().st_size
        assert chosen.artefact.sha256 == recipe.artefact_sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
        if chosen.quality.metric == "accuracy":
            for judged in filter(None, (chosen.quality, made.report.test)):
                assert judged.value == accuracy_of_file(made, file, judged.part), "it is not the file that was judged"
        return file, recipe

    return go


def test_neurons_that_sleep_on_the_training_samples_are_no_proof(run, compressed, replayed):
    """They go if that is asked for, and the certificate tells that other inputs wake them up."""
    parent = run(parent_of("half_asleep"))
    made = compressed(parent, workers=TWO, steps=["lossless", "unused"], max_drop="1%")
    rows = {row.name: row for row in made.report.rungs}
    assert (rows["lossless"].kept, rows["lossless"].why) == (False, "nothing can be removed")
    found = rows[UNUSED]
    assert found.kept
    assert made.report.chosen == UNUSED
    assert found.certificate.claim == "data"
    assert found.certificate.difference_float64 < 1e-9
    assert found.certificate.difference_points > 0.1
    assert found.quality.changed == 0

    _, recipe = replayed(parent, made)
    assert recipe.artefact == "model.safetensors"
    (step,) = recipe.steps
    kept = parse_indices(step.layers["0"].out)
    assert min(kept) >= 12
    small, whole = (api.load(one.paths.root) for one in (made, parent))
    assert small[0].out_features == small[2].in_features == len(kept)
    digits = torch.tensor(load_digits().data).float()
    assert (small(digits).argmax(1) == whole(digits).argmax(1)).float().mean() > 0.99
    x = torch.rand(50, 64) * 16
    assert (small(x) - whole(x)).abs().max() > 0.1


def test_asleep_on_samples_needs_samples_and_asleep_in_the_box_does_not(run, compressed):
    """359 samples cannot show that 0.5 % are not lost. A box with the range of each input proves it."""
    parent = run(parent_of("half_asleep"))
    made = compressed(parent, steps=["unused"])
    assert made.report.chosen == "parent"
    assert "samples cannot show a drop" in made.report.rungs[-1].why
    assert "nothing helps: the result is the parent's model" in made.report.notes
    assert api.load(made.paths.root)[0].out_features == 24
    made = compressed(parent, steps=["lossless"], box="features")
    assert made.report.chosen == "lossless"
    certificate = made.report.rungs[-1].certificate
    assert (certificate.claim, certificate.difference_points < 1e-9) == ("proven", True)
    assert api.load(made.paths.root)[0].out_features == 12


@pytest.mark.long
def test_dense_layers_become_products(run, compressed, replayed, fork_server):
    parent = run(PARENT, steps=200)
    made = compressed(parent, workers=TWO, steps=["low_rank"], max_drop="40%", tune={"epochs": 3, "lr": 0.5})
    rows = {row.name: row for row in made.report.rungs}
    half, quarter = (rows[f"low rank {share}%, tuned"] for share in (50, 25))
    assert [step.kind for step in half.steps] == [step.kind for step in quarter.steps] == ["low_rank", "tune"]
    assert [row.steps[0].layers for row in (half, quarter)] == [{"0": 12, "2": 5}, {"0": 6, "2": 2}]
    assert half.kept
    assert half.parameters == 12 * (64 + 24) + 24 + 5 * (24 + 10) + 10
    assert quarter.artefact.size_bytes < half.artefact.size_bytes < rows["parent"].artefact.size_bytes

    _, recipe = replayed(parent, made)
    ranks = recipe.steps[0].layers
    model = api.load(made.paths.root)
    assert [tuple(p.shape) for p in model[0].parameters()] == [(ranks["0"], 64), (24, ranks["0"]), (24,)]
    assert torch.linalg.matrix_rank(model[0].weight) == ranks["0"]
    x = torch.rand(9, 64)
    assert torch.allclose(model[0](x), torch.nn.functional.linear(x, model[0].weight, model[0].bias), atol=1e-5)
    job, weights = load_run_job(made.paths.job), str(made.paths.model)
    answer = run_probe("evaluate", job, fork_server=fork_server, weights=weights, part="validation", source=None)
    assert answer["metrics"]["validation"]["accuracy"] == pytest.approx(rows[made.report.chosen].quality.value)


@pytest.mark.long
def test_neurons_that_are_seldom_active_go_first(run, compressed, replayed):
    """Half of them never are: half of the neurons can go and nothing changes."""
    parent = run(PARENT, steps=200)
    made = compressed(parent, workers=TWO, steps=["prune"], importance="zeros", **QUICK | {"max_drop": "20%"})
    rows = {row.name: row for row in made.report.rungs}
    with torch.no_grad():
        active = (api.load(parent.paths.root)[0](torch.tensor(load_digits().data).float()) > 0).float().mean(0)
    seldom = {number for number in range(24) if active[number] < 0.01}
    assert seldom >= set(range(12))
    for share, left in ((25, 18), (50, 12)):
        row = rows[f"prune {share}%, tuned"]
        assert row.kept, row.why
        kept = parse_indices(row.steps[0].layers["0"].out)
        assert len(kept) == left
        assert set(range(24)) - set(kept) <= seldom
    replayed(parent, made)


@pytest.mark.long
def test_torchs_encoder_has_products_too(run, compressed, replayed):
    """Its code reads the weights of its layers, and those of its attention are left as they are."""
    parent = run(GPT)
    made = compressed(parent, workers=TWO, steps=["low_rank"], **QUICK)
    row = next(one for one in made.report.rungs if one.name == "low rank 25%, tuned")
    assert row.kept, row.why
    assert set(row.steps[0].layers) == {"head", *(f"layers.{i}.linear{n}" for i in (0, 1) for n in (1, 2))}
    assert set(row.refused) == {f"layers.{i}.self_attn.out_proj" for i in (0, 1)}
    replayed(parent, made)


@pytest.mark.long
def test_eight_bits_that_cost_too_much_are_saved_by_training_through_the_rounding(run, compressed, replayed):
    for library in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(library, reason="the extra compress is not installed")
    parent = run(parent_of("coarse", largest=80.0), steps=200)
    made = compressed(parent, workers=TWO, steps=["int8"], max_drop="15%", tune={"epochs": 5, "lr": 1.0})
    rows = {row.name: row for row in made.report.rungs}
    plain, trained = rows["int8"], rows["int8 with training"]
    assert not plain.kept
    assert plain.quality.drop > 0.3
    assert trained.kept
    assert made.report.chosen == "int8 with training"
    assert trained.quality.drop_bound <= 0.15

    file, recipe = replayed(parent, made)
    assert file.name == "model.onnx"
    tune, onnx = recipe.steps
    assert (tune.kind, tune.hold.kind, tune.hold.layers) == ("tune", "round", {"0": 8, "2": 8})
    assert (onnx.kind, onnx.bits) == ("onnx", 8)
    weight = api.load(made.paths.root)[0].weight.detach()  # what was trained is what 8 bits can hold
    scale = weight.abs().amax(1, keepdim=True) / 127
    assert torch.allclose((weight / scale).round() * scale, weight, atol=1e-4)
    digits = load_digits()
    x, y = torch.tensor(digits.data[:300]).float(), torch.tensor(digits.target[:300])
    with torch.no_grad():
        wanted, found = api.load(made.paths.root)(x), OnnxModel(file)(x)
    assert (wanted.argmax(1) == found.argmax(1)).float().mean() > 0.95
    assert (found.argmax(1) == y).float().mean() > 0.8
    assert trained.artefact.difference > 0


@pytest.mark.long
def test_rungs_that_train_can_lose(run, compressed):
    """A quarter of the rank, and 8 bits for weights of 80,000 and 0.1, cannot be made good by this little training."""
    for library in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(library, reason="the extra compress is not installed")
    parent = run(parent_of("coarse", largest=8e4), steps=200)
    made = compressed(parent, steps=["int8", "low_rank"], max_drop="3%", tune={"epochs": 1, "lr": 0.001})
    rows = {row.name: row for row in made.report.rungs}
    assert not [name for name, row in rows.items() if row.kept and name != "parent"]
    for name in ("int8", "int8 with training", "low rank 50%, tuned"):
        assert rows[name].quality.drop_bound > 0.03
        assert "more than 3.00%" in rows[name].why
    assert "low rank 25%, tuned" not in rows, "less of what was too little is not tried"
    assert (made.report.chosen, made.report.notes) == ("parent", ["nothing helps: the result is the parent's model"])
    assert (made.paths.model / "model.safetensors").read_bytes() == (
        parent.paths.model / "model.safetensors"
    ).read_bytes()


@pytest.mark.long
def test_neurons_that_a_run_shrinks_are_removed_with_a_proof(run, compressed, job_dir):
    """The same bits on two workers, one of which is killed."""
    marks = job_dir / "marks"
    marks.mkdir()
    watcher = {"name": "faults.py:KillAt", "args": {"steps": [7], "marks": str(marks)}}
    shrinking = {"name": "shoal.compression:ProximalAdam", "args": {"lr": 0.01, "shrink": 1.0}}
    job = parent_of("half_dead", hidden=64) | {"optimizer": shrinking, "steps": 300}
    alone, two = run(job), run(job, workers=2, watchers=[watcher], checkpoint={"every": "5 steps"})
    assert (marks / "killed-7").exists()
    assert alone.receipt.weights_sha256 == two.receipt.weights_sha256
    made = compressed(two, steps=["lossless"])
    row = made.report.rungs[-1]
    assert row.kept
    assert row.certificate.claim == "proven"
    assert max(row.certificate.difference_points, row.certificate.difference_float64) < 1e-9
    left = api.load(made.paths.root)[0].out_features
    assert left < 28, "half of the neurons are dead from the start, and of the others some were shrunk"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "said"),
    [("Branching", "SH662: ONNX export failed: "), ("without_runtime", "SH664: onnxruntime cannot be imported: ")],
)
def test_what_cannot_be_exported_or_run_is_named_and_the_best_that_was_found_is_written(
    run, compressed, replayed, name, said
):
    for library in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(library, reason="the extra compress is not installed")
    parent = run(parent_of(name), steps=200)
    before = digests(parent.paths.root)
    made = compressed(parent, steps=["lossless", "int8", "low_bits"], target={"size": "1%"}, **QUICK)
    rows = {row.name: row for row in made.report.rungs}
    for rung in ("runtime: onnx float32", "int8"):
        assert rows[rung].why.startswith(said)
        assert not rows[rung].kept
    assert rows["lossless"].kept == (name == "without_runtime")
    assert name != "Branching" or "cannot be traced" in rows["lossless"].why
    assert made.report.chosen.endswith("bits")
    assert not made.report.targets_met
    assert digests(parent.paths.root) == before
    file, _ = replayed(parent, made)
    assert file.name == "model.packed"


RESIDUAL = PARENT | {
    "model": {"name": "compressible.py:Residual"},
    "data": PARENT["data"] | {"transform": "models.py:as_image"},
    "steps": 60,
}
RECURRENT = GPT | {"model": {"name": "compressible.py:Recurrent", "args": {"vocabulary": 30}}}


@pytest.mark.long
def test_every_rung_of_a_network_with_residuals(run, compressed, replayed):
    parent = run(RESIDUAL)
    made = compressed(parent, workers=TWO, **QUICK)
    rows = {row.name: row for row in made.report.rungs}
    assert not [row.why for row in rows.values() if "SH" in row.why]
    assert rows["lossless"].certificate.difference_points < 1e-9
    replayed(parent, made)


@pytest.mark.long
def test_every_rung_of_a_recurrent_network(run, compressed, replayed):
    """What it does not allow is named, and the others are tried."""
    parent = run(RECURRENT)
    made = compressed(parent, workers=TWO, **QUICK)
    rows = {row.name: row for row in made.report.rungs}
    assert "bounds need one input of floating-point numbers" in rows["lossless"].why
    half = rows["prune 50%, tuned"]
    assert half.kept
    assert half.steps[0].layers["recurrent"].out
    assert any(name.endswith("packed") for name in rows)
    replayed(parent, made)


@pytest.mark.long
def test_a_bug_in_one_rung_costs_that_rung(run, compressed, monkeypatch):
    """The process that has it is a real one; the rungs after it are tried."""
    parent = run(PARENT)
    answering = Workshop._ask

    def ask(workshop, kind, action, *rest, **arguments):
        if action == "lossless":
            arguments["box"] = 3, arguments.pop("claim")  # the action does not know such arguments
        return answering(workshop, kind, action, *rest, **arguments)

    monkeypatch.setattr(Workshop, "_ask", ask)
    made = compressed(parent, steps=["lossless", "unused"], max_drop="90%")
    rows = {row.name: row for row in made.report.rungs}
    assert "a bug: TypeError: lossless() missing" in rows["lossless"].why
    assert "a bug: TypeError" in rows["unused"].why
    assert made.report.chosen == "parent"


@pytest.mark.long
@pytest.mark.parametrize("rung", ["lossless", "unused"])
def test_layers_side_by_side_are_told_and_the_layer_after_them_is_cut(run, compressed, rung):
    made = compressed(run(parent_of("joined")), steps=[rung], max_drop="90%")
    assert made.report.chosen == made.report.rungs[-1].name
    assert made.report.rungs[-1].refused["first"] == "cat combines it with another value"
    assert api.load(made.paths.root).hidden.out_features == 4


@pytest.mark.long
@pytest.mark.parametrize(
    "job",
    [parent_of("computed"), PARENT | {"shape": {"steps": [{"kind": "round", "layers": {"0": 4}}]}}],
    ids=["weight_norm", "rounded"],
)
def test_layers_whose_weights_are_computed_are_named(run, compressed, job):
    """Every rung says so, or leaves them out; what it makes of the others can be loaded."""
    steps = ["lossless", "unused", "int8", "prune", "low_bits", "pack", "low_rank"]
    made = compressed(run(job), steps=steps, **QUICK)
    rows = {row.name: row for row in made.report.rungs}
    why = "its weight is computed from other parameters"
    assert rows["lossless"].refused["0"] == rows[UNUSED].refused["0"] == why
    assert f"0: {why}" in rows["prune"].why
    bugs = [row.why for row in rows.values() if row.why.startswith("a bug")]
    assert not bugs
    assert any(name.endswith("4 bits") and row.steps for name, row in rows.items())
    assert any(name.endswith("4 bits, packed") and row.steps for name, row in rows.items())
    x = torch.rand(5, 64)
    assert api.load(made.paths.root)(x).shape == (5, 10)
