"""A model that becomes smaller during training: the second leg continues the first one's state, cut."""

import json
from types import SimpleNamespace

import pytest
import torch

from shoal import api
from shoal.checkpoint.store import CheckpointStore
from shoal.errors import ErrorGroup, ShoalError, single_errors
from shoal.events import load_state
from shoal.plan.compression import shrink_step, tune_job
from shoal.spec.compression.steps import TuneStep, parse_indices
from shoal.spec.load import load_run_job, make_job
from shoal.spec.run_paths import RunPaths
from shoal.tasks.model import build_task
from tests.conftest import CNN, MLP

pytest.importorskip("torch_pruning", reason="the extra compress is not installed")
SHRINKING = MLP | {"shrink": {"at": "30%", "keep": "60%"}, "steps": 40, "evaluate": {"every_steps": 10}}


CUT_AT = 20  # the first evaluation at or after 30 % of 40 steps
SHORT = {"steps": 8, "evaluate": {"every_steps": 4}}


def test_the_second_leg_continues_with_the_state_cut(run, job_dir):
    result = run(SHRINKING)
    assert (result.status, result.run) == ("finished", "mlp-shrunk-1")
    first = RunPaths.at(job_dir / "runs" / "mlp-1")
    assert json.loads((first.root / "second-leg.json").read_text()) == {"run": "mlp-shrunk-1"}

    stores = [CheckpointStore(paths.checkpoints, job_sha256=None) for paths in (first, result.paths)]
    whole, cut = (store.load(CUT_AT)[1] for store in stores)
    assert stores[0].latest().step == CUT_AT
    assert whole["schedule"] == cut["schedule"]
    assert whole["loop"] == cut["loop"]
    layers = load_run_job(result.paths.job).shape.steps[0].layers
    kept = {name: parse_indices(layers[name].out) for name in layers if layers[name].out}
    assert kept
    for number, name in enumerate(whole["model"]):
        layer, _, part = name.rpartition(".")
        rows = kept.get(layer, range(len(whole["model"][name])))
        inputs = layers[layer].inputs
        columns = parse_indices(inputs) if inputs and part == "weight" else None
        for old, new in (
            (whole["model"][name], cut["model"][name]),
            (
                whole["optimizer"]["state"][number]["momentum_buffer"],
                cut["optimizer"]["state"][number]["momentum_buffer"],
            ),
        ):
            wanted = old[list(rows)]
            assert torch.equal(wanted if columns is None else wanted[:, columns], new)
    small = api.load(result.paths.root)
    assert sum(p.numel() for p in small.parameters()) < sum(v.numel() for v in whole["model"].values())


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"sync": "server"}, "sync"),
        ({"codec": "int8"}, "codec"),
        ({"checkpoint": {"frozen": False}}, "checkpoint.frozen"),
        ({"data": MLP["data"] | {"split": {"kind": "kfold", "folds": 3}}}, "data.split"),
    ],
)
def test_jobs_that_cannot_shrink(job_dir, change, where):
    with pytest.raises((ErrorGroup, ShoalError)) as refused:
        make_job(SHRINKING | change, base_dir=str(job_dir))
    errors = refused.value.errors if isinstance(refused.value, ErrorGroup) else [refused.value]
    assert ("SH668", where) in [(one.code, one.where) for one in errors]


def test_a_task_that_carries_something_on_is_refused_before_it_trains(job_dir):
    own = {name: value for name, value in SHRINKING.items() if name not in ("model", "loss", "metrics")}
    job = make_job(own | {"task": "loops.py:WordLanguageModel"}, base_dir=str(job_dir))
    with pytest.raises(ShoalError, match="has several phases or carries something on") as refused:
        build_task(job)
    assert (refused.value.code, refused.value.where) == ("SH863", "shrink")


def test_without_an_evaluation_in_time(job_dir):
    job = make_job(SHRINKING, base_dir=str(job_dir))
    assert shrink_step(job, 40, [10, 20, 40]) == 20
    with pytest.raises(ShoalError, match="no evaluation lies between 30% of the 40 steps"):
        shrink_step(job, 40, [10, 40])


@pytest.mark.long
@pytest.mark.parametrize("average", ["ema", "swa"])
def test_what_stands_beside_the_weights_is_cut_or_kept(run, job_dir, average):
    """The average of the weights is cut like them; the scale of the loss is a number."""
    result = run(CNN | {"shrink": {"at": "30%"}, "average": average, "precision": "fp16", **SHORT})
    assert result.status == "finished", result.error
    first = RunPaths.at(job_dir / "runs" / f"{CNN['name']}-1")
    stores = [CheckpointStore(paths.checkpoints, job_sha256=None) for paths in (first, result.paths)]
    step = stores[0].latest().step
    whole, cut = (store.load(step)[1] for store in stores)
    assert cut["loss_scale"] == whole["loss_scale"]
    assert cut["average"]["count"] == whole["average"]["count"] > 0
    layers = load_run_job(result.paths.job).shape.steps[0].layers
    values = cut["average"]["values"]
    assert values.keys() == whole["average"]["values"].keys()
    for name, old in whole["average"]["values"].items():
        layer, _, part = name.rpartition(".")
        kept = layers.get(layer)
        if old.dim() and kept and kept.out:
            old = old[parse_indices(kept.out)]
        if kept and kept.inputs and part == "weight":
            old = old[:, parse_indices(kept.inputs)]
        assert torch.equal(values[name], old), name
    assert any(not torch.equal(values[name], cut["model"][name]) for name in values)
    api.load(result.paths.root)


@pytest.mark.long
def test_an_optimizer_that_keeps_something_of_another_shape_is_told(run, job_dir):
    """Sums over rows and columns do not belong to single weights. Nothing of a second leg stays."""
    with pytest.raises(ShoalError) as refused:
        run(SHRINKING | {"optimizer": {"name": "torch.optim:Adafactor"}})
    (failure,) = single_errors(refused.value)
    assert (failure.code, failure.where) == ("SH669", "shrink")
    assert "the optimizer keeps 'col_var' of shape" in failure.message
    assert [path.name for path in (job_dir / "runs").iterdir() if path.name.startswith("mlp-shrunk")] == []


@pytest.mark.long
def test_the_first_leg_is_compressed_alone(run, compressed, job_dir):
    """The result is a run like any other: it has its shape, and does not shrink again."""
    run(SHRINKING | {"best": {"metric": "accuracy"}})
    first = SimpleNamespace(paths=RunPaths.at(job_dir / "runs" / "mlp-1"))
    made = compressed(first, steps=["prune"], max_drop="90%", tune={"epochs": 1, "teacher": False, "scratch": False})
    assert made.report.chosen.startswith("prune 75%")
    job = load_run_job(made.paths.job)
    assert job.shape is not None
    assert job.shrink is None
    before, after = (sum(p.numel() for p in api.load(one.root).parameters()) for one in (first.paths, made.paths))
    assert after < before


def test_a_shrinking_job_tunes_without_shrinking(job_dir):
    job = make_job(SHRINKING, base_dir=str(job_dir))
    tuning = tune_job(job, TuneStep(epochs=1), shape=[], weights=None, teacher=None)
    assert tuning.shrink is None


@pytest.mark.long
@pytest.mark.parametrize("job", [SHRINKING, CNN | {"shrink": {"at": "30%"}}], ids=["mlp", "cnn"])
def test_the_same_bits_on_one_worker_and_on_two_through_kills(run, job_dir, job):
    alone = run(job, workers=1)
    marks = job_dir / "marks"
    marks.mkdir()
    watcher = {"name": "faults.py:KillAt", "args": {"steps": [7, 33], "marks": str(marks)}}
    killed = run(job, workers=2, watchers=[watcher], checkpoint={"every": "5 steps"})
    assert {path.name for path in marks.iterdir()} == {"killed-7", "killed-33"}
    assert killed.receipt.weights_sha256 == alone.receipt.weights_sha256


@pytest.mark.long
def test_workers_on_two_machines_send_fewer_bytes_in_the_second_leg(run, job_dir):
    machines = {"kind": "local", "apart": True, "machines": 2}
    spread, alone = run(SHRINKING, workers=2, engine=machines), run(SHRINKING, runs="other")
    assert spread.status == "finished", spread.error
    assert spread.receipt.weights_sha256 == alone.receipt.weights_sha256
    legs = [
        load_state(paths.events, paths.state_snapshot) for paths in (RunPaths.at(job_dir / "runs/mlp-1"), spread.paths)
    ]
    assert [leg.step for leg in legs] == [CUT_AT, 40]
    per_step = [legs[0].bytes_sent / CUT_AT, legs[1].bytes_sent / (40 - CUT_AT)]
    shares = legs[1].facts["parameters"] / legs[0].facts["parameters"]
    assert 0 < per_step[1] / per_step[0] == pytest.approx(shares, rel=0.1)


@pytest.mark.long
def test_the_same_bits_after_a_stop_in_each_leg(run, resume, job_dir):
    whole = run(SHRINKING)

    def stop_at(step):
        return lambda paths, event, state: "stopped" if event.kind == "step" and event.step >= step else None

    every_step = {"name": "faults.py:KillAt", "args": {"steps": [], "marks": str(job_dir)}}  # so that steps are seen
    stopped = run(SHRINKING, look=stop_at(5), watchers=[every_step], runs="other")
    assert stopped.status == "stopped"
    again = resume(stopped.paths, look=stop_at(25))
    assert (again.status, again.run) == ("stopped", "mlp-shrunk-1")
    done = resume(stopped.paths)  # the first leg leads to the second
    assert done.receipt.weights_sha256 == whole.receipt.weights_sha256
    with pytest.raises(ShoalError, match="has finished"):
        resume(stopped.paths)
