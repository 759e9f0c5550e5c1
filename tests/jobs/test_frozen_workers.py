"""Workers that freeze, hang or are slow: who is put out, and who is not."""

import pytest

from tests.jobs.fault_injection import JOBS, assert_same, events_of_kind, fault_script, fired_faults, reference_receipt

pytestmark = pytest.mark.usefixtures("limited_time")


def test_a_frozen_worker_is_evicted_and_replaced(run, job_dir):
    job = JOBS["mlp"] | {"lanes": 6}
    outcome = run(job, workers=3, watchers=fault_script(job_dir, "freeze worker 1 at step 5 in data"))
    assert_same(outcome, reference_receipt(run, job))
    (row,) = events_of_kind(outcome, "evicted")
    assert row["worker"] == "worker-1"
    assert "frozen" in row["reason"]
    assert outcome.receipt.deaths_survived == 1


def test_a_worker_that_is_frozen_before_it_trains_is_evicted(run, job_dir):
    job = JOBS["mlp"] | {"lanes": 6}
    outcome = run(job, workers=3, watchers=fault_script(job_dir, "freeze worker 1 in building"))
    assert_same(outcome, reference_receipt(run, job))
    assert [row["worker"] for row in events_of_kind(outcome, "evicted")] == ["worker-1"]


@pytest.mark.long
def test_a_newcomer_that_is_frozen_is_evicted(run, job_dir):
    """While the others train."""
    job = JOBS["mlp"] | {"lanes": 6, "steps": 60}
    lines = ["kill worker 1 at step 5 in compute", "freeze worker 3 in building"]
    slow_steps = {"name": "delays.py:SlowSteps", "args": {"seconds": 0.1}}
    outcome = run(job, workers=3, watchers=[*fault_script(job_dir, *lines), slow_steps])
    assert_same(outcome, reference_receipt(run, job))
    assert [row["worker"] for row in events_of_kind(outcome, "evicted")] == ["worker-3"]


def test_a_hanging_worker_is_named_with_step_phase_and_line(run, job_dir):
    job = JOBS["mlp"] | {"lanes": 6}
    outcome = run(job, workers=3, watchers=fault_script(job_dir, "hang worker 1 at step 5 in compute"))
    assert_same(outcome, reference_receipt(run, job))
    (row,) = events_of_kind(outcome, "evicted")
    assert row["worker"] == "worker-1"
    assert "hangs in compute at step 5" in row["reason"]
    assert "faults.py" in row["reason"]


@pytest.mark.long
def test_a_worker_that_is_slow_at_first_is_not_evicted(run, job_dir):
    """A first batch and a first evaluation that take longer than a hang may."""
    job = JOBS["mlp"] | {"lanes": 6, "evaluate": {"every_steps": 12, "batch_size": 16}}
    lines = ["delay worker 1 at step 0 in data by 4000 ms", "delay worker 2 at step 12 in evaluation by 4000 ms"]
    outcome = run(job, workers=3, watchers=fault_script(job_dir, *lines))
    assert_same(outcome, reference_receipt(run, job))
    assert set(lines) == fired_faults(job_dir)
    assert not events_of_kind(outcome, "evicted")
    assert outcome.receipt.deaths_survived == 0
