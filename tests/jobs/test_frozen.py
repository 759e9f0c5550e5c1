"""Workers that freeze, hang or are slow: who is put out, and who is not."""

import pytest

from tests.jobs.disturbed import JOBS, assert_same, calm, fired, rows, script

pytestmark = pytest.mark.usefixtures("soon")


def test_a_frozen_worker_is_put_out_and_replaced(run, place):
    job = JOBS["mlp"] | {"lanes": 6}
    outcome = run(job, workers=3, watch=script(place, "freeze worker 1 at step 5 in data"))
    assert_same(outcome, calm(run, job))
    (row,) = rows(outcome, "put_out")
    assert row["worker"] == "worker-1"
    assert "frozen" in row["reason"]
    assert outcome.receipt.deaths_survived == 1


def test_a_worker_that_is_frozen_before_it_trains_is_put_out(run, place):
    job = JOBS["mlp"] | {"lanes": 6}
    outcome = run(job, workers=3, watch=script(place, "freeze worker 1 in building"))
    assert_same(outcome, calm(run, job))
    assert [row["worker"] for row in rows(outcome, "put_out")] == ["worker-1"]


@pytest.mark.long
def test_a_newcomer_that_is_frozen_is_put_out(run, place):
    """While the others train."""
    job = JOBS["mlp"] | {"lanes": 6, "steps": 60}
    lines = ["kill worker 1 at step 5 in compute", "freeze worker 3 in building"]
    dawdle = {"name": "pace.py:Dawdle", "args": {"seconds": 0.1}}
    outcome = run(job, workers=3, watch=[*script(place, *lines), dawdle])
    assert_same(outcome, calm(run, job))
    assert [row["worker"] for row in rows(outcome, "put_out")] == ["worker-3"]


def test_a_hanging_worker_is_named_with_step_phase_and_line(run, place):
    job = JOBS["mlp"] | {"lanes": 6}
    outcome = run(job, workers=3, watch=script(place, "hang worker 1 at step 5 in compute"))
    assert_same(outcome, calm(run, job))
    (row,) = rows(outcome, "put_out")
    assert row["worker"] == "worker-1"
    assert "hangs in compute at step 5" in row["reason"]
    assert "faults.py" in row["reason"]


def test_who_is_slow_at_first_is_not_put_out(run, place):
    """A first batch and a first evaluation that take longer than a hang may."""
    job = JOBS["mlp"] | {"lanes": 6, "evaluate": {"every_steps": 12, "batch_size": 16}}
    lines = ["delay worker 1 at step 0 in data by 4000 ms", "delay worker 2 at step 12 in evaluation by 4000 ms"]
    outcome = run(job, workers=3, watch=script(place, *lines))
    assert_same(outcome, calm(run, job))
    assert set(lines) == fired(place)
    assert not rows(outcome, "put_out")
    assert outcome.receipt.deaths_survived == 0
