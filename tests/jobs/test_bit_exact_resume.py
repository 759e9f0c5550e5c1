"""Interrupted equals undisturbed: the same SHA-256, wherever the worker is killed."""

import json
import os
import random
import signal
import subprocess
import sys

import pytest
import yaml

from shoal.events import read_events
from tests.conftest import CNN, GPT, MLP, long_only

JOBS = {"mlp": MLP, "cnn": CNN, "gpt": GPT}


def kill_points(seed, steps, number):
    """Kill points: distinct steps, and how long after the step."""
    rng = random.Random(seed)
    return sorted(rng.sample(range(1, steps), number)), rng.choice([0, 0, 0.001, 0.004])


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("seed", [1, *long_only(2)])
def test_killed_workers_change_nothing(name, seed, run, job_dir):
    job = JOBS[name]
    undisturbed = run(job).receipt
    steps, delay_s = kill_points(seed, job["steps"], 4)
    kill = {"name": "faults.py:KillAt", "args": {"steps": steps, "marks": str(job_dir), "delay_s": delay_s}}
    outcome = run(job, watchers=[kill], elastic={"restarts": 9}, checkpoint={"every": "1 steps"})
    assert outcome.status == "finished", outcome.error
    receipt = outcome.receipt
    assert receipt.deaths_survived == len(steps), f"seed {seed}: killed at {steps} after {delay_s} s"
    assert receipt.weights_sha256 == undisturbed.weights_sha256
    assert receipt.state_sha256 == undisturbed.state_sha256
    assert receipt.metrics == undisturbed.metrics
    assert receipt.samples_seen == undisturbed.samples_seen


def test_a_kill_after_the_last_step_changes_nothing(run, job_dir):
    """The last evaluation is not made twice: the schedule would learn from it twice."""
    plateau = {"name": "ReduceLROnPlateau", "args": {"patience": 0, "threshold": 10.0}}
    data = MLP["data"] | {"split": {"kind": "holdout", "validation": 0.2, "test": 0.1}}
    job = MLP | {"schedule": plateau, "data": data, "checkpoint": {"every": "1 steps"}}
    undisturbed = run(job).receipt
    kill = {"name": "faults.py:KillAtEvaluation", "args": {"part": "test", "step": 60, "marks": str(job_dir)}}
    receipt = run(job, watchers=[kill]).receipt
    assert receipt.deaths_survived == 1
    assert receipt.state_sha256 == undisturbed.state_sha256
    assert receipt.metrics == undisturbed.metrics


def test_buffers_that_the_state_dict_leaves_out_survive(run, job_dir):
    drifts = {"name": "models.py:NonPersistentBuffer"}
    undisturbed = run(MLP, model=drifts).receipt
    kill = {"name": "faults.py:KillAt", "args": {"steps": [30], "marks": str(job_dir)}}
    again = run(MLP, model=drifts, watchers=[kill], checkpoint={"every": "1 steps"}).receipt
    assert again.weights_sha256 == undisturbed.weights_sha256


@pytest.mark.parametrize("every", [1, 7])
def test_draws_from_pythons_and_numpys_generators_are_the_lanes_own(run, job_dir, every):
    """Also when the first draw comes late: the worker finds out, and does that lane again."""
    dice = {"model": {"name": "models.py:UnseededRandomness", "args": {"every": every}}}
    undisturbed = run(MLP, **dice).receipt
    kill = {"name": "faults.py:KillAt", "args": {"steps": [7, 23, 24, 51], "marks": str(job_dir)}}
    again = run(MLP, **dice, watchers=[kill], elastic={"restarts": 9}, checkpoint={"every": "1 steps"}).receipt
    assert again.weights_sha256 == undisturbed.weights_sha256


def test_a_task_that_remembers(run, job_dir):
    job = {k: v for k, v in MLP.items() if k not in ("model", "loss", "metrics")} | {
        "task": "models.py:StatefulTask",
        "lanes": 1,
    }
    undisturbed = run(job).receipt
    kill = {"name": "faults.py:KillAt", "args": {"steps": [13, 40], "marks": str(job_dir)}}
    again = run(job, watchers=[kill], checkpoint={"every": "1 steps"}).receipt
    assert again.weights_sha256 == undisturbed.weights_sha256


def test_a_kill_before_the_first_save_starts_again(run, job_dir):
    kill = {"name": "faults.py:KillAt", "args": {"steps": [3], "marks": str(job_dir)}}
    assert run(MLP, watchers=[kill]).receipt.weights_sha256 == run(MLP).receipt.weights_sha256


def test_saving_changes_nothing(run):
    assert run(CNN).receipt.weights_sha256 == run(CNN, checkpoint={"every": "3 steps"}).receipt.weights_sha256


def test_the_seed_changes_everything(run):
    assert run(MLP).receipt.weights_sha256 != run(MLP, seed=1).receipt.weights_sha256


def test_loader_workers_change_nothing(run):
    data = CNN["data"] | {"loader": {"workers": 2}}
    assert run(CNN, data=data).receipt.weights_sha256 == run(CNN).receipt.weights_sha256


def test_a_worker_that_dies_again_and_again_is_given_up(run, job_dir):
    kill = {"name": "faults.py:KillAt", "args": {"steps": list(range(1, 30)), "marks": str(job_dir)}}
    outcome = run(MLP, watchers=[kill], elastic={"restarts": 2})
    assert outcome.error.code == "SH603"
    assert "SIGKILL" in outcome.error.message


def test_a_damaged_checkpoint_is_passed_over_and_told(run, resume, job_dir):
    undisturbed = run(MLP).receipt
    kill = {"name": "faults.py:KillAt", "args": {"steps": [40], "marks": str(job_dir)}}
    broken = run(MLP, watchers=[kill], checkpoint={"every": "10 steps"}, elastic={"restarts": 0})
    newest = max((broken.paths.checkpoints / "manifests").glob("*.json"))
    newest.write_bytes(newest.read_bytes()[:-200])
    told = []
    again = resume(broken.paths, look=lambda paths, event, run_state: told.append(event))
    assert [e.step for e in told if e.kind == "checkpoint_invalid"] == [int(newest.stem)]
    assert [e.kind for e in told].count("run_started") == 1, "what the first driver showed is not shown again"
    assert again.receipt.weights_sha256 == undisturbed.weights_sha256


def test_a_full_disk_stops_no_training(run, job_dir):
    """Files may not grow beyond 40 kB in the worker: weights fit, the optimizer's state does not."""
    full = {"name": "faults.py:FileSizeLimit", "args": {"most_bytes": 40_000}}
    wide = {"name": "models.py:mlp", "args": {"inputs": 64, "classes": 10, "hidden": 300}}
    undisturbed = run(MLP, model=wide).receipt
    outcome = run(MLP, model=wide, watchers=[full], checkpoint={"every": "10 steps", "keep_best": 0})
    assert outcome.error.code == "SH510"  # the last save has to succeed
    kinds = [e.kind for e in read_events(outcome.paths.events)]
    assert kinds.count("save_failed") >= 2
    assert "resumed" not in kinds
    again = run(MLP, model=wide, watchers=[full | {"args": {"most_bytes": 40_000, "until": 45}}],
                checkpoint={"every": "10 steps", "keep_best": 0})  # fmt: skip
    assert again.receipt.weights_sha256 == undisturbed.weights_sha256


class ShoalCommand:
    """`shoal` as a user starts it."""

    def __init__(self, job_dir, *words):
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from shoal.cli import main; main()", *words, "--runs", str(job_dir / "runs")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def read_until(self, kind):
        """Read rows up to one of this kind."""
        for line in self.process.stdout:
            row = json.loads(line)
            if row["kind"] == kind:
                return row
        raise AssertionError(self.process.stderr.read())

    def wait(self):
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err


@pytest.fixture
def long_job(job_dir):
    """Long enough that a signal comes in the middle."""
    job = MLP | {"steps": 800, "checkpoint": {"every": "20 steps"}}
    (job_dir / "job.yaml").write_text(yaml.safe_dump(job))
    return str(job_dir / "job.yaml")


@pytest.mark.parametrize("number", [*long_only(signal.SIGINT, signal.SIGTERM, signal.SIGKILL)])
def test_a_stopped_or_killed_driver_is_resumed_to_the_same_weights(number, long_job, job_dir, run):
    undisturbed = run(MLP, steps=800).receipt
    command = ShoalCommand(job_dir, "run", long_job, "--json")
    command.read_until("saved")
    os.kill(command.process.pid, number)
    code, _, err = command.wait()
    assert code == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    if number != signal.SIGKILL:
        assert "shoal resume mlp-2" in err
    code, out, err = ShoalCommand(job_dir, "resume", "mlp-2", "--json").wait()
    assert code == 0, err
    receipt = json.loads(out.splitlines()[-1])
    assert receipt["weights_sha256"] == undisturbed.weights_sha256
    assert receipt["state_sha256"] == undisturbed.state_sha256
    assert receipt["starts"] == 2
    assert receipt["deaths_survived"] == 0, "only the driver was killed"
    events = list(read_events(job_dir / "runs" / "mlp-2" / "events.jsonl"))
    steps = [e.step for e in events if e.kind == "resumed"]
    if number == signal.SIGKILL:  # its worker went on without it, and the next driver took it over
        assert not steps
        assert len([e for e in events if e.kind == "worker_started"]) == 1
    else:
        assert 0 < steps[0] < 800
