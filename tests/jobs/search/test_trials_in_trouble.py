"""Trials that do not fit into the memory, and searches that are stopped on purpose."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest

from shoal.errors import ShoalError, error
from shoal.jobs import run_dir
from shoal.jobs.search.driver import run_search
from shoal.jobs.search.journal import ShapeRow
from shoal.jobs.search.search_dir import SearchPaths, create, find
from shoal.jobs.search.space_file import search_fields
from shoal.jobs.search.stopping import stop_search
from shoal.jobs.search.stretches import StretchRuns
from shoal.jobs.search.summary import compare_searches, read_search
from shoal.jobs.search.trials import describe_failure
from shoal.plan.search.trial import Stretch
from tests.jobs.fault_injection import processes_of
from tests.jobs.search.test_crashes import wait_for
from tests.jobs.search.test_search import PROMOTE, job_file, start_process, told  # noqa: F401

GRID = {"policy": {"kind": "full", "sampler": "grid"}, "budget": "2 trials"}


@pytest.mark.long
def test_a_trial_that_is_larger_than_the_memory_is_not_begun(search):
    """The larger net needs some terabytes for its weights, gradients and optimizer state."""
    outcome = search(1, search=GRID | {"space": {"model.args.hidden": [16, 4_000_000_000]}})
    small, large = read_search(outcome.paths).table.trials.values()
    assert (small.state, large.state) == ("complete", "failed")
    assert large.failure.startswith("SH634: it needs at least")
    assert "the machine has" in large.failure
    assert not outcome.paths.trial(large.number).root.exists()
    assert outcome.receipt.exact is False
    assert "trial 1 failed on this machine" in outcome.receipt.why


@pytest.mark.long
def test_a_limit_of_the_job_counts_too(search):
    outcome = search(1, search=GRID | {"space": {"model.args.hidden": [16, 4_000_000]}}, limits={"memory": "2 GB"})
    failures = [trial.failure for trial in read_search(outcome.paths).table.trials.values()]
    assert failures[0] == ""
    assert failures[1].startswith("SH634")
    assert "limits.memory is 2" in failures[1]


HOG = """
import torch
from torch import nn


class Hog(nn.Module):
    \"\"\"Asks for memory that no check of its shape can foresee.\"\"\"

    def __init__(self, inputs=64, hungry=0):
        super().__init__()
        self.layer, self.hungry = nn.Linear(inputs, 10), hungry

    def forward(self, x):
        if self.hungry and x.device.type != "meta" and self.training:
            torch.zeros(self.hungry, dtype=torch.int8).add_(1)
        return self.layer(x)
"""


SICK = """
from torch import nn


class Sick(nn.Linear):
    def __init__(self, sick=False):
        super().__init__(64, 10)
        self.sick = sick

    def forward(self, x):
        if self.sick and self.training:
            raise RuntimeError(f"seen in {__file__}")
        return super().forward(x)
"""


@pytest.mark.long
def test_a_search_is_the_same_in_another_directory_also_where_the_users_code_fails(make, job_dir, fork_server):
    found = []
    (job_dir / "sick.py").write_text(SICK)
    for name in ("one", "other"):
        folder = shutil.copytree(job_dir, job_dir.parent / name)
        space = {"model.args.sick": [False, True]}
        job = make(search=GRID | {"space": space}, model={"name": "sick.py:Sick", "args": {"sick": False}})
        job = job.model_copy(update={"base_dir": str(folder)})
        outcome = run_search(job, runs=folder / "runs", workers=1, fork_server=fork_server)
        found.append(read_search(outcome.paths))
    for one in found:
        failure = one.table.trials[1].failure
        assert failure.startswith("SH401"), failure
        assert "seen in sick.py" in failure
        assert failure.endswith("(sick.py:12)")
    assert compare_searches(*found).difference == ""
    assert found[0].receipt.search_sha256 == found[1].receipt.search_sha256


@pytest.mark.parametrize(
    ("where", "place"),
    [
        ("/home/me/nets/sick.py:3", " (nets/sick.py:3)"),
        ("/usr/lib/torch/nn.py:9", " (nn.py:9)"),
        ("model.args", " (model.args)"),
        ("worker-2", ""),
        ("", ""),
    ],
)
def test_files_in_a_failure_are_told_as_seen_from_the_job(where, place, make):
    job = make().model_copy(update={"base_dir": "/home/me"})
    failure = error("SH401", "cannot read /home/me/data/x.csv\nmore", where=where)
    assert describe_failure(failure, job) == f"SH401: cannot read data/x.csv{place}"


@pytest.mark.long
def test_a_trial_that_runs_out_of_memory_is_recorded_and_the_search_goes_on(search, job_dir):
    """The worker's own limit refuses the memory, where it may not make a cgroup; where it may, the kernel kills it."""
    (job_dir / "hog.py").write_text(HOG)
    space = {"model.args.hungry": [0, 1 << 40, 1]}
    outcome = search(
        1,
        model={"name": "hog.py:Hog", "args": {"hungry": 0}},
        search=GRID | {"space": space, "budget": "3 trials"},
        limits={"memory": "8 GB"},
    )
    states = [trial.state for trial in read_search(outcome.paths).table.trials.values()]
    assert states == ["complete", "failed", "complete"]
    failure = read_search(outcome.paths).table.trials[1].failure
    assert failure.startswith(("SH407", "SH603"))
    assert "memory" in failure
    assert outcome.receipt.exact is False


@pytest.mark.long
def test_workers_that_are_killed_again_and_again_are_a_failure_with_its_reason(search):
    """As the kernel kills them when memory is short: SIGKILL whenever a worker of the second trial lives."""
    killed = []

    def look(progress):
        for pid in processes_of(progress.paths.trial(1).root):
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    slow = {"faults": {"pause_probability": 1.0, "pause_s": 0.2}}
    outcome = search(1, look=look, search=GRID | {"space": {"optimizer.args.lr": [0.01, 0.02]}}, **slow)
    failed = read_search(outcome.paths).table.trials[1]
    assert killed
    assert failed.state == "failed"
    assert "SIGKILL (out of memory?)" in failed.failure
    assert outcome.receipt.winner == 0


def shoal(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "shoal", *arguments], cwd=cwd, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.long
@pytest.mark.parametrize("command", [("stop",), ("search", "stop")])
def test_a_search_is_stopped_from_another_process_and_goes_on(command, search, resume, job_file, job_dir):  # noqa: F811
    slow = {"faults": {"pause_probability": 1.0, "pause_s": 0.05}}
    undisturbed = search(2, search=PROMOTE)
    file, runs = job_file(search=PROMOTE, **slow), job_dir / "stopped"
    process = start_process(file, runs, str(file))
    for line in process.stdout:
        if json.loads(line).get("kind") == "told":
            break
    answer = shoal(*command, "last" if "search" in command else "small-1", "--runs", str(runs), cwd=job_dir)
    assert answer.returncode == 0, answer.stderr
    assert "shoal search resume small-1" in answer.stdout
    process.stdout.read()
    assert process.wait() == 143
    paths = find("last", runs)
    assert not processes_of(paths.root)
    assert not paths.stop_request.exists()
    assert read_search(paths).status == "stopped"
    assert resume(paths).receipt.decisions_sha256 == undisturbed.receipt.decisions_sha256


SHARDED = {"shard": ["none", {"kind": "fsdp", "size": 4}]}


def test_a_search_with_fewer_workers_than_a_trial_needs_is_refused_before_anything_is_written(search, job_dir):
    """The first trial needs one, another one four."""
    with pytest.raises(ShoalError) as caught:
        search(2, search={"space": SHARDED}, lanes=4, workers=4)
    assert (caught.value.code, caught.value.where) == ("SH106", "workers")
    assert not (job_dir / "runs").exists()


@pytest.mark.parametrize("space", [[1], "optimizer.args.lr"])
def test_a_space_from_python_that_is_no_section_is_an_error_of_the_user(space):
    with pytest.raises(ShoalError) as caught:
        search_fields(space)
    assert (caught.value.code, caught.value.where) == ("SH105", "space")


@pytest.mark.parametrize("workers", [0, -1])
def test_a_search_has_at_least_one_worker(workers, make, job_dir):
    with pytest.raises(ShoalError) as caught:
        run_search(make(), runs=job_dir / "runs", workers=workers)
    assert (caught.value.code, caught.value.where) == ("SH106", "workers")
    assert not (job_dir / "runs").exists()


def test_a_trial_that_needs_more_workers_than_there_are_ends_the_wait(make, job_dir):
    """Where no single value of the space showed it before."""
    paths = create(make(), job_dir / "runs")
    runs = StretchRuns(SearchPaths(paths.run), None, 2)
    job = make(lanes=4, workers=4, shard={"kind": "fsdp", "size": 4})
    runs.add(Stretch(0, 0, 0, {}, 0, 1, 0.0, 1.0), job, ShapeRow(trial=0, changes={}, units=1, cost=1.0))
    with pytest.raises(ShoalError) as caught:
        list(runs.dispatch(awaited=0, takes_results=True))
    assert (caught.value.code, caught.value.where) == ("SH106", "workers")


def test_a_stop_that_reaches_a_driver_while_it_begins_is_not_lost(make, job_dir):
    """It removes requests that were meant for earlier drivers, also this one."""
    paths = create(make(), job_dir / "runs")
    with run_dir.driver_lock(paths.run):
        asking = threading.Thread(target=stop_search, args=(paths,))
        asking.start()
        for _ in range(2):
            wait_for(paths.stop_request.exists)
            paths.stop_request.unlink()
        wait_for(paths.stop_request.exists)
    asking.join()
    assert not paths.stop_request.exists()


def test_a_search_that_nobody_drives_cannot_be_stopped(make, job_dir):
    paths = create(make(), job_dir / "runs")
    with pytest.raises(ShoalError) as caught:
        stop_search(SearchPaths(paths.run))
    assert caught.value.code == "SH633"
