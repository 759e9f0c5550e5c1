"""Watchers that look at the worker's own objects, and the ready ones."""

import csv
import json

from tests.conftest import MLP
from tests.jobs.fault_injection import fault_script

SHORT = MLP | {"steps": 6, "evaluate": {"every_steps": 3}, "lanes": 2}


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


def test_curves_as_csv(run):
    outcome = run(SHORT, watchers=["csv"])
    with (outcome.paths.root / "csv" / "curves.csv").open() as file:
        rows = list(csv.DictReader(file))
    losses = [row for row in rows if row["name"] == "train/loss"]
    assert [int(row["step"]) for row in losses] == [1, 2, 3, 4, 5, 6]
    last = [float(row["value"]) for row in rows if row["name"] == "validation/accuracy"][-1]
    assert last == outcome.receipt.metrics["accuracy"]


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


def test_the_learning_rate_finder_names_a_rate_on_any_number_of_workers(run):
    finder = {"name": "lr_finder", "args": {"low": 1e-4, "high": 10.0, "steps": 30}}
    one, two = (run(SHORT, steps=60, watchers=[finder], workers=workers) for workers in (1, 2))
    assert "falls fastest at a learning rate of" in one.receipt.stopped
    assert one.receipt.stopped == two.receipt.stopped
    assert one.receipt.weights_sha256 == two.receipt.weights_sha256
    with (one.paths.root / "lr_finder" / "lr_finder.csv").open() as file:
        rates = [float(row["lr"]) for row in csv.DictReader(file)]
    assert rates == sorted(rates)
    assert rates[0] == 1e-4


def test_a_trace_for_perfetto(run):
    outcome = run(SHORT, watchers=[{"name": "profiler", "args": {"first": 2, "steps": 2}}])
    (trace,) = (outcome.paths.root / "profiler").glob("trace-*.json")
    names = {event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"aten::linear", "aten::addmm"} & names
