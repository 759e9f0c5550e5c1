"""Runs with codecs: what is lost on the way is the same on any number of workers, and a receipt says when it is not."""

import os
import signal

import pytest

from shoal.jobs import commands
from tests.conftest import CNN, MLP, long_only
from tests.jobs.background_run import background_run
from tests.jobs.fault_injection import (
    assert_nothing_left,
    assert_same,
    events_of_kind,
    fault_script,
    fired_faults,
    reference_receipt,
    time_limit,
)

FORGETFUL = {"bf16": {"kind": "bf16"}, "fp16": {"kind": "fp16"}, "int8": {"kind": "int8", "block": 64}}
REMEMBERING = {
    "int4": {"kind": "int4"},
    "int3": {"kind": "int3"},
    "sign": {"kind": "sign"},
    "topk": {"kind": "topk", "keep": 0.05},
    "topk with momentum": {"kind": "topk", "keep": 0.05, "momentum": 0.9},
    "lowrank": {"kind": "lowrank", "rank": 2},
}
CODECS = FORGETFUL | REMEMBERING
SMALL = MLP | {"steps": 12, "evaluate": {"every_steps": 6}}
PICTURES = CNN | {"steps": 8, "evaluate": {"every_steps": 8}, "lanes": 4}
SIGNED = SMALL | {"codec": REMEMBERING["sign"]}


@pytest.fixture(autouse=True)
def limited_time():
    with time_limit(60):
        yield


# ---- the same bits ----


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(
    ("job", "numbers"),
    [(SMALL, (3,)), *long_only((SMALL, (2, 4)), (PICTURES, (3,)))],
    ids=["mlp", "mlp, others", "cnn"],
)
def test_any_number_of_workers_gives_the_same_bits(job, numbers, name, run):
    job = job | {"codec": CODECS[name]}
    for workers in numbers:
        outcome = run(job, workers=workers)
        assert_same(outcome, reference_receipt(run, job))
        assert (outcome.receipt.exact, outcome.receipt.workers) == (True, workers)
    assert reference_receipt(run, job).weights_sha256 != reference_receipt(run, job, codec="none").weights_sha256
    assert outcome.receipt.why.startswith(f"sync: lanes, codec: {job['codec']['kind']}; lanes computed again")


def test_lanes_without_samples_keep_their_residuals(run):
    """The last batch of 1438 samples has 2, for 8 lanes."""
    job = SIGNED | {"batch_size": 359, "lanes": 8, "steps": 10}
    assert_same(run(job, workers=3), reference_receipt(run, job))


def test_a_loss_with_a_divisor_of_its_own(run):
    job = {k: v for k, v in SIGNED.items() if k not in ("model", "loss", "metrics")}
    job |= {"task": "models.py:TokenTask", "lanes": 5}
    assert_same(run(job, workers=3), reference_receipt(run, job))


# ---- coming and going ----


@pytest.mark.long
@pytest.mark.parametrize("name", [*long_only("int8", "topk with momentum"), "lowrank"])
def test_residuals_follow_lanes_that_move(name, run, job_dir):
    changes = {"steps": 300, "evaluate": {"every_steps": 150}, "codec": CODECS[name]}
    enough = job_dir / "enough"
    watchers = [{"name": "delays.py:SlowSteps", "args": {"seconds": 0.1, "until": str(enough)}}]
    with background_run(run, MLP, workers=1, watchers=watchers, **changes) as it:
        it.wait_for_workers(1)
        commands.scale(it.paths, 3)
        it.wait_for_workers(3)
        seat, _ = commands.drain(it.paths, "worker-0")
        assert commands.wait_for_departure(it.paths, seat).startswith("left at step ")
        it.wait_for_workers(2)
        commands.scale(it.paths, 4)
        it.wait_for_workers(4)
        enough.touch()
    outcome = it.outcome.result()
    assert_same(outcome, reference_receipt(run, MLP, **changes))
    assert outcome.receipt.exact
    assert not events_of_kind(outcome, "residual_lost")
    assert_nothing_left(outcome)


def test_a_worker_that_is_terminated_leaves_nothing_behind_unsaid(run, job_dir):
    job = SIGNED | {"steps": 200}
    outcome = run(job, workers=3, watchers=fault_script(job_dir, "terminate worker 1 at step 5 in compute"))
    assert_same(outcome, reference_receipt(run, job))
    assert outcome.receipt.exact


# ---- deaths ----


@pytest.mark.parametrize("name", [*long_only("bf16", "fp16"), "int8"])
def test_a_death_changes_nothing_where_nothing_is_remembered(name, run, job_dir):
    job = SMALL | {"codec": CODECS[name]}
    outcome = run(job, workers=3, watchers=fault_script(job_dir, "kill worker 1 at step 5 in exchange"))
    assert_same(outcome, reference_receipt(run, job))
    assert fired_faults(job_dir)
    assert (outcome.receipt.exact, outcome.receipt.deaths_survived) == (True, 1)


@pytest.mark.parametrize("name", ["int3", "topk with momentum", *long_only("int4", "sign", "topk", "lowrank")])
def test_what_died_with_a_worker_stands_in_the_receipt(name, run, job_dir):
    outcome = run(
        SMALL, codec=CODECS[name], workers=4, watchers=fault_script(job_dir, "kill worker 1 at step 5 in compute")
    )
    assert outcome.status == "finished"
    receipt = outcome.receipt
    assert (receipt.exact, receipt.deaths_survived, receipt.steps) == (False, 1, 12)
    assert [(row["lane"], row["worker"], row.step) for row in events_of_kind(outcome, "residual_lost")] == [
        (1, "worker-1", 5)
    ]
    assert receipt.why == (
        f"sync: lanes, codec: {CODECS[name]['kind']}: the residual of lane 1 was lost with worker-1 at step 5"
    )


@pytest.mark.parametrize("line", ["kill worker 1 at step 6 while applying", "kill worker 0 at step 6 in telling"])
def test_a_worker_a_step_behind_commits_the_residuals_the_others_had(line, run, job_dir):
    """Of three lanes that lived on, none lost anything."""
    outcome = run(SIGNED, workers=4, watchers=fault_script(job_dir, line))
    assert outcome.status == "finished"
    assert fired_faults(job_dir) == {line}
    (row,) = events_of_kind(outcome, "residual_lost")
    assert row["worker"] == f"worker-{row['lane']}" == f"worker-{line.split()[2]}"


def test_a_death_after_the_last_step_loses_nothing(run, job_dir):
    outcome = run(SIGNED, workers=3, watchers=fault_script(job_dir, "kill worker 1 at step 12 in telling"))
    assert_same(outcome, reference_receipt(run, SIGNED))
    assert outcome.receipt.exact


def test_a_death_before_the_first_step_loses_nothing(run, job_dir):
    outcome = run(SIGNED, workers=3, watchers=fault_script(job_dir, "kill worker 1 at step 0 in compute"))
    assert_same(outcome, reference_receipt(run, SIGNED))
    assert outcome.receipt.exact


# ---- checkpoints ----


@pytest.mark.parametrize(
    ("name", "workers"),
    [("topk", 2), ("sign", 1), ("lowrank", 3), *long_only(("sign", 2), ("topk with momentum", 2), ("lowrank", 2))],
)
def test_resuming_gives_the_bits_of_a_run_that_went_through(name, workers, run, resume):
    job = SMALL | {"codec": CODECS[name], "steps": 120}

    def stop(paths, event, run_state):
        if event.kind == "evaluated" and event.step == 12:
            os.kill(os.getpid(), signal.SIGTERM)

    outcome = run(job, look=stop, workers=workers)
    assert outcome.status == "terminated"
    assert 12 <= outcome.saved_step < 120
    again = resume(outcome.paths)
    assert_same(again, reference_receipt(run, job))
    assert again.receipt.exact
    assert events_of_kind(again, "resumed")


@pytest.mark.parametrize("workers", [*long_only(1), 3])
def test_when_all_die_residuals_come_from_the_checkpoint(workers, run, job_dir):
    """Saved while others train; a save takes its time."""
    lines = ["delay worker 0 at step 8 in data by 1500 ms", "kill all at step 9"]
    saves = {"checkpoint": {"every": "3 steps", "keep_best": 0}, "elastic": {"restarts": 9}}
    outcome = run(SIGNED, workers=workers, watchers=fault_script(job_dir, *lines), **saves)
    assert_same(outcome, reference_receipt(run, SIGNED))
    assert outcome.receipt.exact
    (row,) = events_of_kind(outcome, "resumed")
    assert row.step in (3, 6), "the last save may have been in the making"


@pytest.mark.long
def test_one_lane_goes_by_checkpoint(run, job_dir):
    job = SIGNED | {"lanes": 1, "steps": 1500, "evaluate": {"every_steps": 500}}  # others come before it is finished
    outcome = run(job, watchers=fault_script(job_dir, "terminate worker 0 at step 5 in compute"))
    assert_same(outcome, reference_receipt(run, job))
    assert outcome.receipt.exact
    assert events_of_kind(outcome, "resumed")


# ---- what is sent ----


def test_on_one_host_nothing_but_wakeups_is_sent(run):
    receipt = run(SIGNED, workers=2).receipt
    assert receipt.bytes_sent == 12 * 2 * 64
    assert receipt.bytes_plain == 0
