"""Whole runs with a real worker: what a job can ask for."""

import json
import math

import pytest
import safetensors.torch
import torch
from sklearn.metrics import roc_auc_score

import shoal
from shoal.checkpoint.manifest import list_manifests
from shoal.events import read_events
from shoal.spec.data import DataConfig
from shoal.spec.receipt import read_receipt_file
from tests.conftest import CNN, GPT, MLP


def events(outcome, kind):
    return [e for e in read_events(outcome.paths.events) if e.kind == kind]


def test_the_receipt_tells_what_was_done(run):
    outcome = run(MLP)
    r = outcome.receipt
    assert (r.exact, r.steps, r.lanes, r.starts, r.deaths_survived) == (True, 60, 4, 1, 0)
    assert r.samples_seen == 60 * 50 - (29 * 50 - 1438) * 2  # two short batches
    assert r.metrics.keys() == {"loss", "accuracy"}
    assert r.parameters == 64 * 32 + 32 + 32 * 10 + 10
    assert r.compute_s > 0
    assert json.loads(outcome.paths.receipt.read_text())["weights_sha256"] == r.weights_sha256


def test_lanes_change_speed_and_randomness_but_not_what_is_learnt(run):
    plain = MLP | {"model": {"name": "models.py:UnusedParameter"}, "metrics": ["accuracy"]}
    plain |= {"optimizer": {"name": "SGD", "args": {"lr": 1e-4}}}  # small: differences of rounding do not grow
    one, eight = run(plain, lanes=1).receipt, run(plain, lanes=8).receipt
    assert one.metrics["loss"] == pytest.approx(eight.metrics["loss"], rel=1e-4)


def test_metrics_over_lanes_are_those_of_the_whole(run, job_dir):
    data = {"source": {"kind": "sklearn", "name": "breast_cancer"}, "split": {"kind": "holdout"}}
    job = MLP | {
        "model": {"name": "models.py:mlp", "args": {"inputs": 30, "classes": 1}},
        "loss": "BCEWithLogitsLoss",
        "metrics": ["auc", "accuracy", "recall", "f1"],
        "data": data,
        "evaluate": {"batch_size": 7},
        "steps": 20,
    }
    outcome = run(job, optimizer={"name": "SGD", "args": {"lr": 1e-5}})
    from shoal.data.datasets import open_datasets

    held = open_datasets(DataConfig.model_validate(data), seed=0, base_dir=str(job_dir), cache_dir=job_dir).held_out[
        "validation"
    ]
    batch = held.source.take(held.ids)
    with torch.no_grad():
        scores = shoal.load(outcome.paths.root)(*batch.inputs).squeeze(-1)
    found = outcome.receipt.metrics
    assert found["auc"] == pytest.approx(roc_auc_score(batch.target, scores), abs=1e-6)
    assert found["accuracy"] == pytest.approx(float(((scores > 0) == batch.target.bool()).float().mean()))
    loss = torch.nn.functional.binary_cross_entropy_with_logits(scores.double(), batch.target.double())
    assert found["loss"] == pytest.approx(float(loss), rel=1e-5)


def test_a_regression_with_a_column_of_outputs_is_not_broadcast(run):
    data = {"source": {"kind": "sklearn", "name": "diabetes"}, "split": {"kind": "holdout"}}
    outcome = run(MLP, model={"name": "models.py:mlp", "args": {"inputs": 10, "classes": 1}}, loss="MSELoss",
                  metrics=["rmse", "mae", "r2"], data=data, steps=10)  # fmt: skip
    found = outcome.receipt.metrics
    assert found["rmse"] ** 2 == pytest.approx(found["loss"], rel=1e-4)


def test_a_task_of_ones_own(run):
    job = {k: v for k, v in MLP.items() if k not in ("model", "loss", "metrics")}
    one, four = (run(job, task="models.py:TokenTask", lanes=lanes).receipt for lanes in (1, 4))
    assert one.metrics["loss"] == pytest.approx(four.metrics["loss"], rel=1e-3)


@pytest.mark.parametrize("job", [MLP, CNN, GPT], ids=lambda job: job["name"])
def test_bf16_is_exact_too(run, job):
    few = {"precision": "bf16", "steps": 4, "evaluate": {"every_steps": 4}}
    assert run(job, **few).receipt.weights_sha256 == run(job, **few).receipt.weights_sha256


def test_early_stopping_stops_at_the_same_step_after_a_kill(run, job_dir):
    impatient = {"stop_early": {"metric": "loss", "patience": 2}, "steps": 2000, "evaluate": {"every_steps": 5},
                 "optimizer": {"name": "SGD", "args": {"lr": 0.5}}}  # fmt: skip
    undisturbed = run(MLP, **impatient).receipt
    assert undisturbed.steps < 2000
    assert "has not improved" in undisturbed.stopped
    kill = {"name": "faults.py:KillAt", "args": {"steps": [undisturbed.steps - 3], "marks": str(job_dir)}}
    again = run(MLP, watchers=[kill], checkpoint={"every": "1 steps"}, **impatient).receipt
    assert again.deaths_survived == 1
    assert (again.steps, again.weights_sha256) == (undisturbed.steps, undisturbed.weights_sha256)


def test_a_schedule_that_waits_for_the_metric(run):
    outcome = run(MLP, schedule={"name": "ReduceLROnPlateau", "args": {"patience": 0, "threshold": 10.0}})
    rates = [e["lr"] for e in events(outcome, "step")]
    assert rates[-1] < 0.05


def test_a_schedule_per_epoch(run):
    schedule = {"name": "StepLR", "args": {"step_size": 1, "gamma": 0.5}, "every": "epoch"}
    outcome = run(MLP, schedule=schedule, watchers=[{"name": "models.py:StepRecorder", "args": {"path": "/dev/null"}}])
    assert events(outcome, "step")[-1]["lr"] == pytest.approx(0.05 * 0.5**2)


def test_watchers_see_every_step_and_may_stop(run, job_dir):
    seen = job_dir / "seen.txt"
    watchers = [
        {"name": "models.py:StepRecorder", "args": {"path": str(seen)}},
        {"name": "models.py:StopAt", "args": {"step": 17}},
    ]
    outcome = run(MLP, watchers=watchers)
    assert [int(line.split()[0]) for line in seen.read_text().splitlines()] == list(range(1, 18))
    assert (outcome.receipt.steps, outcome.receipt.stopped) == (17, "enough")


def test_the_last_weights_are_measured_wherever_a_watcher_stops(run):
    outcome = run(MLP, watchers=[{"name": "models.py:StopAt", "args": {"step": 25}}])
    assert [e.step for e in events(outcome, "evaluated")] == [20, 25]


def test_a_checkpoint_has_the_metric_of_its_own_step_or_none(run):
    outcome = run(MLP, checkpoint={"every": "1 steps", "keep": 100}, steps=45)
    metrics = {m.step: m.metric for m in list_manifests(outcome.paths.checkpoints)}
    measured = {e.step: e["metrics"]["loss"] for e in events(outcome, "evaluated")}
    assert metrics.keys() - measured.keys()
    assert metrics == {step: measured.get(step) for step in metrics}


def test_a_metric_that_is_not_a_number_spoils_nothing(run):
    outcome = run(MLP, metrics=["models.py:NanMetric"], best={"metric": "NanMetric", "mode": "max"})
    assert math.isnan(read_receipt_file(outcome.paths.receipt).own.metrics["NanMetric"])
    with pytest.raises(shoal.ShoalError, match="SH606"):
        shoal.load(outcome.paths.root, best=True)
    summary = run(MLP, metrics=["models.py:NanMetric"], data=MLP["data"] | {"split": {"kind": "kfold", "folds": 2}})
    assert math.isnan(summary.metrics["NanMetric"][1])


def test_evaluation_loads_as_the_job_says(run, job_dir):
    """A dataset that must not be forked is not."""
    (job_dir / "held.py").write_text(
        "import os, torch\nhere = os.getpid()\n"
        "class Held(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 40\n"
        "    def __getitem__(self, i):\n"
        "        assert os.getpid() == here, 'forked'\n"
        "        return torch.ones(64) * i / 40, i % 10\n"
    )
    data = {"source": {"kind": "python", "factory": "held.py:Held"}, "split": "holdout", "loader": {"workers": 0}}
    assert run(MLP, data=data, batch_size=8, steps=4).status == "finished"


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"watchers": ["models.py:RaisingWatcher"]}, "SH410", "oops"),
        ({"model": {"name": "models.py:NanOutput"}}, "SH403", "nan"),
        ({"model": {"name": "models.py:WrongInputWidth"}}, "SH715", "expects 63 features and gets 64"),
        ({"metrics": [{"name": "accuracy", "args": {"task": "binary"}}]}, "SH408", "accuracy"),
        ({"loss": "MSELoss"}, "SH714", "their shapes differ"),
        ({"init_from": {"freeze": ["*"]}}, "SH404", ""),
        ({"init_from": {"freeze": ["nothing.*"]}}, "SH405", "nothing"),
        ({"optimizer": {"name": "SGD", "args": {"lr": 0.1}, "groups": [{"match": "hea*"}]}}, "SH405", "hea"),
        ({"optimizer": {"name": "LBFGS"}, "sync": "server"}, "SH860", "several times"),
        ({"schedule": {"name": "OneCycleLR", "args": {"max_lr": 0.1, "total_steps": 9}}}, "SH413", "step 10 times"),
        ({"device": "cuda:7"}, "SH411", "cuda:7"),
        ({"best": {"metric": "accuracy"}, "metrics": ["f1"]}, "SH106", "accuracy"),
        ({"task": "models.py:UnusedParameter", "model": None, "loss": None, "metrics": []}, "SH206", "UnusedParameter"),
        ({"watchers": ["models.py:UnusedParameter"]}, "SH206", "watch(event)"),
    ],
)  # fmt: skip
def test_mistakes_are_told(run, changes, code, words):
    job = {k: v for k, v in (MLP | changes).items() if v is not None}
    try:
        failure = run(job).error
    except shoal.ShoalError as early:
        failure = early
    assert failure is not None
    assert failure.code == code, str(failure)
    assert words in failure.message
    assert failure.fix


def test_too_few_samples_for_batch_norm_say_so(run):
    data = CNN["data"] | {"transform": "models.py:as_image"}
    outcome = run(CNN | {"model": {"name": "models.py:norm1d"}}, data=data, batch_size=3, lanes=3, steps=2)
    assert outcome.error.code == "SH412"


def test_the_model_is_exported_with_everything_to_load_it_again(run):
    outcome = run(MLP, export=["program"])
    model = shoal.load(outcome.paths.root)
    info = json.loads((outcome.paths.model / "model.json").read_text())
    assert info["weights_sha256"] == outcome.receipt.weights_sha256
    program = torch.export.load(outcome.paths.model / "model.pt2").module()
    x = torch.randn(5, 64)
    torch.testing.assert_close(program(x), model(x))


def test_starting_from_another_run(run):
    first = run(MLP)
    init = {"path": str(first.paths.root), "freeze": ["0"]}
    groups = [{"match": "3.bias", "args": {"lr": 0.5}}]
    second = run(MLP, init_from=init, optimizer={"name": "SGD", "args": {"lr": 0.01}, "groups": groups}, seed=9)
    a, b = (safetensors.torch.load_file(o.paths.model / "model.safetensors") for o in (first, second))
    assert torch.equal(a["0.weight"], b["0.weight"])
    assert not torch.equal(a["3.weight"], b["3.weight"])
    by_name = run(MLP, init_from=init | {"path": first.paths.name}, seed=9,
                  optimizer={"name": "SGD", "args": {"lr": 0.01}, "groups": groups})  # fmt: skip
    assert by_name.receipt.weights_sha256 == second.receipt.weights_sha256


def test_weights_that_do_not_fit(run, job_dir):
    first = run(MLP)
    wider = {"name": "models.py:mlp", "args": {"inputs": 64, "classes": 7}}
    init = {"path": str(first.paths.model)}
    strict = run(MLP, model=wider, init_from=init, metrics=[], data=MLP["data"] | {"split": "none"}, evaluate={})
    assert strict.error.code == "SH406"
    assert "'3.bias' is [10] in the file and [7] in the model" in strict.error.message
    safetensors.torch.save_file({"x": torch.zeros(1)}, job_dir / "other.safetensors")
    none = run(MLP, init_from={"path": "other.safetensors", "strict": False})
    assert none.error.code == "SH406"


@pytest.mark.parametrize(
    "sampler", [{"kind": "hash", "by": "id"}, {"kind": "balanced", "by": "size"}, {"kind": "random", "shuffle": False}]
)
def test_every_way_of_dealing_trains_exactly(run, job_dir, sampler):
    data = MLP["data"] | {"sampler": sampler}
    undisturbed = run(MLP, data=data).receipt
    kill = {"name": "faults.py:KillAt", "args": {"steps": [11, 31], "marks": str(job_dir)}}
    again = run(MLP, data=data, watchers=[kill], checkpoint={"every": "7 steps"}).receipt
    assert again.weights_sha256 == undisturbed.weights_sha256


def test_a_loss_of_ones_own_gets_what_the_model_gave(run):
    ours, torchs = run(GPT, loss="models.py:own_loss").receipt, run(GPT).receipt
    assert ours.metrics["loss"] == pytest.approx(torchs.metrics["loss"], rel=1e-4)
