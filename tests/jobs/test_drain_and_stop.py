"""Workers that are asked to go, runs that are stopped, and workers without a driver."""

import json
import os
import signal
import time

import pytest
import yaml

from shoal.checkpoint.manifest import list_manifests
from shoal.events import read_events
from shoal.spec.run_paths import RunPaths
from tests.conftest import long_only
from tests.jobs.fault_injection import (
    JOBS,
    assert_nothing_left,
    assert_same,
    events_of_kind,
    fault_script,
    fired_faults,
    processes_of,
    reference_receipt,
)
from tests.jobs.test_bit_exact_resume import ShoalCommand

pytestmark = pytest.mark.usefixtures("limited_time")


def stop_when_fired(job_dir):
    """For `look=`: as soon as the script has done something, the run is asked to end."""

    def look(paths, event, run_state):
        if fired_faults(job_dir) and not asked:
            asked.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    asked = []
    return look


def test_a_worker_that_is_terminated_leaves_without_loss(run, job_dir):
    job = JOBS["mlp"] | {"lanes": 6, "steps": 200}
    outcome = run(job, workers=3, watchers=fault_script(job_dir, "terminate worker 0 at step 5 in compute"))
    assert_same(outcome, reference_receipt(run, job))
    assert [row.who for row in events_of_kind(outcome, "left") if row["why"] == "asked to leave"] == ["worker-0"]
    assert not events_of_kind(outcome, "stopped"), "a step was discarded"
    assert outcome.receipt.deaths_survived == 0


def test_all_are_terminated_at_once(run, job_dir):
    """They stay until others have what they hold."""
    job = JOBS["mlp"] | {"lanes": 6, "steps": 200}
    outcome = run(job, workers=3, watchers=fault_script(job_dir, "terminate all at step 5 in compute"))
    assert_same(outcome, reference_receipt(run, job))
    assert outcome.receipt.deaths_survived == 0
    assert not events_of_kind(outcome, "resumed")


def test_a_stop_before_the_workers_are_there(run):
    def stop(paths, event, run_state):
        if event.kind == "run_started":
            os.kill(os.getpid(), signal.SIGINT)

    outcome = run(JOBS["mlp"], look=stop, workers=3, lanes=6)
    assert outcome.status == "interrupted"
    assert_nothing_left(outcome)


def test_a_stop_finds_a_frozen_worker(run, resume, job_dir):
    """The others come to no boundary without it, unless it was found before the word to stop came."""
    job = JOBS["mlp"] | {"lanes": 6}
    outcome = run(
        job,
        look=stop_when_fired(job_dir),
        workers=3,
        watchers=fault_script(job_dir, "freeze worker 1 at step 5 in data"),
    )
    assert outcome.status == "terminated"
    assert outcome.saved_step >= 5
    assert_nothing_left(outcome)
    assert_same(resume(outcome.paths), reference_receipt(run, job))


def test_a_stop_at_which_the_saver_dies_loses_nothing(run, resume, job_dir):
    job = JOBS["mlp"] | {"lanes": 6}
    outcome = run(
        job,
        look=stop_when_fired(job_dir),
        workers=3,
        watchers=fault_script(job_dir, "freeze worker 0 at step 15 in data"),
    )
    assert outcome.status == "terminated"
    assert outcome.saved_step >= 15, "the others may have gone on before the word came"
    assert_same(resume(outcome.paths), reference_receipt(run, job))


# ---- without a driver ----


@pytest.fixture
def long_job(job_dir):
    job = JOBS["mlp"] | {"steps": 500, "lanes": 6, "workers": 3, "checkpoint": {"every": "never", "keep_best": 0}}
    (job_dir / "job.yaml").write_text(yaml.safe_dump(job))
    return job


def lose_driver(job_dir):
    """A driver in a process of its own, killed while its three workers train. The run's paths and their processes."""
    command = ShoalCommand(job_dir, "run", str(job_dir / "job.yaml"), "--json")
    started = {}
    joined = 0
    while joined < 3:
        row = json.loads(command.process.stdout.readline())
        joined += row["kind"] == "joined"
        if row["kind"] == "worker_started":
            started[row["who"]] = row["pid"]
    os.kill(command.process.pid, signal.SIGKILL)
    command.wait()
    return RunPaths.at(job_dir / "runs" / "mlp-1"), started


@pytest.mark.long
@pytest.mark.parametrize("killed", [*long_only([], ["worker-0"]), ["worker-0", "worker-2"]])
def test_workers_outlive_their_driver(killed, long_job, job_dir, run, resume):
    paths, started = lose_driver(job_dir)
    for name in killed:
        os.kill(started[name], signal.SIGKILL)
    outcome = resume(paths)
    assert_same(outcome, reference_receipt(run, long_job))
    assert not events_of_kind(outcome, "resumed")
    assert sorted(row["worker"] for row in events_of_kind(outcome, "worker_died")) == killed
    assert outcome.receipt.deaths_survived == len(killed), "who left at the end did not die"
    again = [row for row in events_of_kind(outcome, "worker_started") if row["pid"] not in started.values()]
    assert len(again) <= len(killed), "who was alive was taken over"
    after = max(row.t for row in events_of_kind(outcome, "run_started"))
    carried = {row.who for row in events_of_kind(outcome, "joined") if row.t > after}
    assert set(started) - set(killed) <= carried
    assert_nothing_left(outcome)


@pytest.mark.long
def test_workers_without_a_driver_save_and_leave(long_job, job_dir, run, resume):
    (job_dir / "job.yaml").write_text(yaml.safe_dump(long_job | {"steps": 100_000, "elastic": {"patience_s": 0.5}}))
    paths, started = lose_driver(job_dir)
    deadline = time.monotonic() + 30
    while processes_of(paths.root) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not processes_of(paths.root)
    left = [row for row in read_events(paths.events) if row.kind == "left"]
    assert {row.who for row in left} == set(started)
    assert all("no driver" in row["why"] for row in left)
    assert len({row.step for row in left}) == 1, "they agree where they stop"
    assert max(manifest.step for manifest in list_manifests(paths.checkpoints)) == left[0].step
