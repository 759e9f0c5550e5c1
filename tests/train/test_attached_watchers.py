"""Watchers: what they see on the worker, and the ready ones."""

import csv
import json

import pytest
import torch
from torch import nn

from shoal.errors import ShoalError
from shoal.events import Event
from shoal.train.ready_watchers import CsvCurves, LearningRateFinder, TorchProfiler
from shoal.train.watched import AttachedWorker
from tests.conftest import MLP
from tests.jobs.fault_injection import fault_script

SHORT = MLP | {"steps": 6, "evaluate": {"every_steps": 3}, "lanes": 2}


@pytest.mark.compat_row(
    "callbacks that look at model, optimizers and batches", "works", how="a watcher with `attach(worker)`"
)
def test_an_attached_watcher_sees_model_optimizer_and_batches(run, job_dir):
    (job_dir / "spy.py").write_text(
        "import json\n"
        "from pathlib import Path\n"
        "class Spy:\n"
        "    def __init__(self, place): self.place = Path(place)\n"
        "    def attach(self, worker): self.worker = worker\n"
        "    def watch(self, event):\n"
        "        kinds = ('before_step', 'batch', 'step', 'before_evaluation', 'evaluated')\n"
        "        if event.kind in kinds:\n"
        "            total = sum(float(p.detach().double().sum()) for p in self.worker.model.parameters())\n"
        "            size = event['batch'].size if event.kind == 'batch' else 0\n"
        "            lr = self.worker.optimizer.param_groups[0]['lr']\n"
        "            with self.place.open('a') as file:\n"
        "                file.write(json.dumps([event.kind, event.step, size, total, lr]) + '\\n')\n"
    )
    plain = run(SHORT)
    seen = run(SHORT, self_check=0, watchers=[{"name": "spy.py:Spy", "args": {"place": str(job_dir / "seen")}}])
    assert seen.status == "finished", seen.error
    assert seen.receipt.weights_sha256 == plain.receipt.weights_sha256
    rows = [json.loads(line) for line in (job_dir / "seen").read_text().splitlines()]
    one = ["before_step", "batch", "batch", "step"]
    measured = ["before_evaluation", "evaluated"]
    assert [row[0] for row in rows] == (one * 3 + measured) * 2
    assert [row[2] for row in rows if row[0] == "batch"] == [25] * 12
    before, after = ([row[3] for row in rows if row[0] == kind] for kind in ("before_step", "step"))
    assert before[1:] == after[:-1]  # a step begins with the weights that the last one left
    assert len(set(after)) == 6


@pytest.mark.compat_row("CSV", "works", how="`watchers: [csv]`")
def test_curves_as_csv(run):
    outcome = run(SHORT, watchers=["csv"])
    with (outcome.paths.root / "csv" / "curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    losses = [row for row in rows if row["name"] == "train/loss"]
    assert [int(row["step"]) for row in losses] == [1, 2, 3, 4, 5, 6]
    last = [float(row["value"]) for row in rows if row["name"] == "validation/accuracy"][-1]
    assert last == outcome.receipt.metrics["accuracy"]


@pytest.mark.compat_row("TensorBoard", "works", how="`watchers: [tensorboard]`")
def test_tensorboard(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    outcome = run(SHORT, watchers=["tensorboard"])
    found = EventAccumulator(str(outcome.paths.root / "tensorboard"))
    found.Reload()
    assert [one.step for one in found.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    last = found.Scalars("validation/accuracy")[-1]
    assert (last.step, last.value) == (6, pytest.approx(outcome.receipt.metrics["accuracy"]))


@pytest.mark.parametrize("left", ["", "step,na", "step,name,value\r\n1,train/loss,0.5\r\n1,train/l"])
def test_curves_go_on_after_a_row_that_was_not_finished(tmp_path, left):
    """A kill came between opening the file and writing the row."""
    (tmp_path / "curves.csv").write_bytes(left.encode())
    CsvCurves(str(tmp_path)).watch(Event("step", step=2, fields={"loss": 0.25, "lr": 0.1}))
    rows = (tmp_path / "curves.csv").read_text().splitlines()
    before = ["1,train/loss,0.5"] if "0.5" in left else []
    assert rows == ["step,name,value", *before, "2,train/loss,0.25", "2,train/lr,0.1"]


def test_curves_through_a_kill_and_a_resume_have_every_row_once(run, resume, job_dir):
    """A worker that is killed, or a run that is resumed, computes steps again that are written already."""
    job = SHORT | {"steps": 10, "evaluate": {"every_steps": 5}}
    plain = _curves(run(job, watchers=["csv"]))
    leader = fault_script(job_dir, "kill worker 0 at step 4 in exchange")
    assert _curves(run(job, workers=2, watchers=["csv", *leader])) == plain
    kill = {"name": "faults.py:KillAt", "args": {"steps": [7], "marks": str(job_dir)}}
    failed = run(job, watchers=["csv", kill], elastic={"restarts": 0}, checkpoint={"every": "3 steps"})
    assert len(_curves(failed)) > 12, "there are rows after the checkpoint"
    assert _curves(resume(failed.paths)) == plain


def _curves(outcome):
    with (outcome.paths.root / "csv" / "curves.csv").open() as file:
        return list(csv.reader(file))


@pytest.mark.compat_row("learning-rate finder", "works", how="`watchers: [lr_finder]`")
def test_the_learning_rate_finder_names_a_rate_on_any_number_of_workers(run, job_dir):
    finder = {"name": "lr_finder", "args": {"low": 1e-4, "high": 0.05, "steps": 30}}
    one, two = (run(SHORT, steps=60, watchers=[finder], workers=workers) for workers in (1, 2))
    assert "falls fastest at a learning rate of" in one.receipt.stopped
    assert one.receipt.stopped == two.receipt.stopped
    assert one.receipt.weights_sha256 == two.receipt.weights_sha256
    kill = {"name": "faults.py:KillAt", "args": {"steps": [9], "marks": str(job_dir)}}
    again = run(SHORT, steps=60, watchers=[finder, kill], checkpoint={"every": "4 steps"})
    assert again.receipt.deaths_survived == 1
    assert (again.receipt.stopped, again.receipt.weights_sha256) == (one.receipt.stopped, one.receipt.weights_sha256)
    with (one.paths.root / "lr_finder" / "lr_finder.csv").open() as file:
        rates = [float(row["lr"]) for row in csv.DictReader(file)]
    assert len(rates) == 30
    assert rates == sorted(rates)
    assert rates[0] == 1e-4


def test_the_learning_rate_finder_answers_when_the_loss_is_no_number(run, job_dir):
    """What it looks for would otherwise end the run."""
    (job_dir / "diverging.py").write_text(
        "import torch\n"
        "from torch.nn import functional\n"
        "def loss(output, target):\n"
        "    found = functional.cross_entropy(output, target)\n"
        "    return found if output.abs().max() < 20 else found * torch.inf\n"
    )
    finder = {"name": "lr_finder", "args": {"low": 1e-3, "high": 1e6, "steps": 30}}
    job = SHORT | {"loss": "diverging.py:loss", "steps": 40, "evaluate": {"every_steps": 40}}
    one, two = (run(job, watchers=[finder], workers=workers) for workers in (1, 2))
    assert one.status == "finished", one.error
    assert "falls fastest at a learning rate of" in one.receipt.stopped
    assert one.receipt.stopped == two.receipt.stopped
    with (one.paths.root / "lr_finder" / "lr_finder.csv").open() as file:
        losses = [row["loss"] for row in csv.DictReader(file)]
    assert losses[-1] == "inf"
    assert run(job, optimizer={"name": "SGD", "args": {"lr": 1e6}}).error.code == "SH403"


def test_the_learning_rate_finder_suggests_without_a_slope(tmp_path):
    finder = LearningRateFinder(str(tmp_path), low=1e-3, high=1.0, steps=4)
    assert finder.suggestion() == 1e-3
    finder.load_state({"points": [[1e-3, 1.0], [1e-2, float("nan")]]})
    assert finder.suggestion() == 1e-3


@pytest.mark.parametrize("made", [LearningRateFinder, TorchProfiler])
def test_a_watcher_refuses_a_run_that_is_too_short(tmp_path, made):
    one = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ShoalError, match=r"SH107.*and the run has 5"):
        made(str(tmp_path)).attach(AttachedWorker(nn.Linear(1, 1), [one], torch.device("cpu"), str(tmp_path), 5))


def test_ready_watchers_on_two_workers_change_no_bit(run):
    profiler = {"name": "profiler", "args": {"first": 2, "steps": 2}}
    plain, seen = run(SHORT), run(SHORT, workers=2, watchers=["tensorboard", "csv", profiler])
    assert seen.status == "finished", seen.error
    assert seen.receipt.weights_sha256 == plain.receipt.weights_sha256
    assert sum(row[1:2] == ["train/loss"] for row in _curves(seen)) == 6
    assert len(list((seen.paths.root / "profiler").glob("trace-*.json"))) == 2


@pytest.mark.compat_row("a trace of torch's profiler for Perfetto", "works", how="`watchers: [profiler]`")
def test_a_trace_for_perfetto(run):
    outcome = run(SHORT, watchers=[{"name": "profiler", "args": {"first": 2, "steps": 2}}])
    (trace,) = (outcome.paths.root / "profiler").glob("trace-*.json")
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"aten::linear", "aten::addmm"} & names


def test_on_two_workers_watchers_see_each_lane_once_and_the_same_weights(run, job_dir):
    """With all optimizers of a Task that has several."""
    (job_dir / "spy.py").write_text(
        "import json\n"
        "import os\n"
        "from pathlib import Path\n"
        "class Spy:\n"
        "    def __init__(self, place): self.place = Path(place)\n"
        "    def attach(self, worker): self.worker = worker\n"
        "    def watch(self, event):\n"
        "        if event.kind in ('batch', 'step'):\n"
        "            total = sum(float(p.detach().double().sum()) for p in self.worker.model.parameters())\n"
        "            kept = [len(one.state) for one in self.worker.optimizers]\n"
        "            assert self.worker.optimizer is self.worker.optimizers[0]\n"
        "            row = [event.kind, event.step, event.get('lane'), total, kept]\n"
        "            with (self.place / f'seen-{os.getpid()}').open('a') as file:\n"
        "                file.write(json.dumps(row) + '\\n')\n"
    )
    gan = {name: value for name, value in SHORT.items() if name not in ("model", "loss", "metrics", "evaluate")}
    source = {"kind": "python", "factory": "loops.py:Images"}
    job = gan | {"task": "loops.py:Dcgan", "data": {"source": source}, "batch_size": 12, "steps": 3, "self_check": 0}
    seen = {}
    for workers in (1, 2):
        place = job_dir / f"{workers}"
        place.mkdir()
        outcome = run(job, workers=workers, watchers=[{"name": "spy.py:Spy", "args": {"place": str(place)}}])
        assert outcome.status == "finished", outcome.error
        files = list(place.glob("seen-*"))
        assert len(files) == workers
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        seen[workers] = {
            "lanes": sorted(row[1:3] for row in rows if row[0] == "batch"),
            "weights": {(row[1], row[3], *row[4]) for row in rows if row[0] == "step"},
        }
    assert seen[1] == seen[2]
    assert seen[1]["lanes"] == [[step, lane] for step in range(3) for lane in range(2)]
    assert len(seen[1]["weights"]) == 3
    for _, _, *kept in seen[1]["weights"]:  # both optimizers have made updates
        assert len(kept) == 2
        assert min(kept) > 0


def test_the_learning_rate_finder_sets_the_rate_of_every_optimizer(tmp_path):
    made = [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr) for lr in (0.5, 0.7)]
    finder = LearningRateFinder(str(tmp_path), low=1e-3, high=1.0, steps=4)
    finder.attach(AttachedWorker(nn.Linear(1, 1), made, torch.device("cpu"), str(tmp_path), 4))
    finder.watch(Event("before_step", step=3))
    assert [one.param_groups[0]["lr"] for one in made] == pytest.approx([1.0, 1.0])
