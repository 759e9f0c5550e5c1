"""Runs with codecs: what is lost on the way is the same on any number of workers, and a receipt says when it is not."""

import os
import signal

import pytest

from shoal.jobs import wishes
from tests.conftest import CNN, MLP, long
from tests.jobs.disturbed import assert_nothing_left, assert_same, calm, fired, in_time, rows, script
from tests.jobs.driven import driven

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
def soon():
    with in_time(60):
        yield


# ---- the same bits ----


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(
    ("job", "numbers"), [(SMALL, (3,)), *long((SMALL, (2, 4)), (PICTURES, (3,)))], ids=["mlp", "mlp, others", "cnn"]
)
def test_any_number_of_workers_gives_the_same_bits(job, numbers, name, run):
    job = job | {"codec": CODECS[name]}
    for workers in numbers:
        outcome = run(job, workers=workers)
        assert_same(outcome, calm(run, job))
        assert (outcome.receipt.exact, outcome.receipt.workers) == (True, workers)
    assert calm(run, job).weights_sha256 != calm(run, job, codec="none").weights_sha256
    assert outcome.receipt.why == f"sync: lanes, codec: {job['codec']['kind']}"


def test_lanes_without_samples_keep_what_they_remember(run):
    """The last batch of 1438 samples has 2, for 8 lanes."""
    job = SIGNED | {"batch_size": 359, "lanes": 8, "steps": 10}
    assert_same(run(job, workers=3), calm(run, job))


def test_a_loss_with_a_divisor_of_its_own(run):
    job = {k: v for k, v in SIGNED.items() if k not in ("model", "loss", "metrics")}
    job |= {"task": "models.py:TokenTask", "lanes": 5}
    assert_same(run(job, workers=3), calm(run, job))


# ---- coming and going ----


@pytest.mark.parametrize("name", [*long("int8", "topk with momentum"), "lowrank"])
def test_lanes_that_move_take_along_what_they_remember(name, run, place):
    changes = {"steps": 300, "evaluate": {"every_steps": 150}, "codec": CODECS[name]}
    enough = place / "enough"
    watch = [{"name": "pace.py:Dawdle", "args": {"seconds": 0.1, "until": str(enough)}}]
    with driven(run, MLP, workers=1, watch=watch, **changes) as it:
        it.trains(1)
        wishes.scale(it.paths, 3)
        it.trains(3)
        seat, _ = wishes.drain(it.paths, "worker-0")
        assert wishes.departure(it.paths, seat).startswith("left at step ")
        it.trains(2)
        wishes.scale(it.paths, 4)
        it.trains(4)
        enough.touch()
    outcome = it.outcome.result()
    assert_same(outcome, calm(run, MLP, **changes))
    assert outcome.receipt.exact
    assert not rows(outcome, "memory_lost")
    assert_nothing_left(outcome)


def test_a_worker_that_is_terminated_leaves_nothing_behind_unsaid(run, place):
    job = SIGNED | {"steps": 200}
    outcome = run(job, workers=3, watch=script(place, "terminate worker 1 at step 5 in compute"))
    assert_same(outcome, calm(run, job))
    assert outcome.receipt.exact


# ---- deaths ----


@pytest.mark.parametrize("name", [*long("bf16", "fp16"), "int8"])
def test_a_death_changes_nothing_where_nothing_is_remembered(name, run, place):
    job = SMALL | {"codec": CODECS[name]}
    outcome = run(job, workers=3, watch=script(place, "kill worker 1 at step 5 in exchange"))
    assert_same(outcome, calm(run, job))
    assert fired(place)
    assert (outcome.receipt.exact, outcome.receipt.deaths_survived) == (True, 1)


@pytest.mark.parametrize("name", ["int3", "topk with momentum", *long("int4", "sign", "topk", "lowrank")])
def test_what_died_with_a_worker_stands_in_the_receipt(name, run, place):
    outcome = run(SMALL, codec=CODECS[name], workers=4, watch=script(place, "kill worker 1 at step 5 in compute"))
    assert outcome.status == "finished"
    receipt = outcome.receipt
    assert (receipt.exact, receipt.deaths_survived, receipt.steps) == (False, 1, 12)
    assert [(row["lane"], row["worker"], row.step) for row in rows(outcome, "memory_lost")] == [(1, "worker-1", 5)]
    assert receipt.why == (
        f"sync: lanes, codec: {CODECS[name]['kind']}: what lane 1 remembered was lost with worker-1 at step 5"
    )


@pytest.mark.parametrize("line", ["kill worker 1 at step 6 while applying", "kill worker 0 at step 6 in telling"])
def test_who_is_a_step_behind_settles_what_the_others_had(line, run, place):
    """Of three lanes that lived on, none lost anything."""
    outcome = run(SIGNED, workers=4, watch=script(place, line))
    assert outcome.status == "finished"
    assert fired(place) == {line}
    (row,) = rows(outcome, "memory_lost")
    assert row["worker"] == f"worker-{row['lane']}" == f"worker-{line.split()[2]}"


def test_a_death_after_the_last_step_loses_nothing(run, place):
    outcome = run(SIGNED, workers=3, watch=script(place, "kill worker 1 at step 12 in telling"))
    assert_same(outcome, calm(run, SIGNED))
    assert outcome.receipt.exact


def test_a_death_before_the_first_step_loses_nothing(run, place):
    outcome = run(SIGNED, workers=3, watch=script(place, "kill worker 1 at step 0 in compute"))
    assert_same(outcome, calm(run, SIGNED))
    assert outcome.receipt.exact


# ---- checkpoints ----


@pytest.mark.parametrize(
    ("name", "workers"),
    [("topk", 2), ("sign", 1), ("lowrank", 3), *long(("sign", 2), ("topk with momentum", 2), ("lowrank", 2))],
)
def test_resuming_gives_the_bits_of_a_run_that_went_through(name, workers, run, resume):
    job = SMALL | {"codec": CODECS[name], "steps": 120}

    def stop(paths, event, picture):
        if event.kind == "evaluated" and event.step == 12:
            os.kill(os.getpid(), signal.SIGTERM)

    outcome = run(job, look=stop, workers=workers)
    assert outcome.status == "terminated"
    assert 12 <= outcome.saved_step < 120
    again = resume(outcome.paths)
    assert_same(again, calm(run, job))
    assert again.receipt.exact
    assert rows(again, "resumed")


@pytest.mark.parametrize("workers", [*long(1), 3])
def test_when_all_die_the_checkpoint_remembers(workers, run, place):
    """Saved while others train; a save takes its time."""
    lines = ["delay worker 0 at step 8 in data by 1500 ms", "kill all at step 9"]
    saves = {"checkpoint": {"every": "3 steps", "keep_best": 0}, "engine": {"kind": "local", "restarts": 9}}
    outcome = run(SIGNED, workers=workers, watch=script(place, *lines), **saves)
    assert_same(outcome, calm(run, SIGNED))
    assert outcome.receipt.exact
    (row,) = rows(outcome, "resumed")
    assert row.step in (3, 6), "the last save may have been in the making"


@pytest.mark.long
def test_one_lane_goes_by_checkpoint(run, place):
    job = SIGNED | {"lanes": 1, "steps": 1500, "evaluate": {"every_steps": 500}}  # others come before it is finished
    outcome = run(job, watch=script(place, "terminate worker 0 at step 5 in compute"))
    assert_same(outcome, calm(run, job))
    assert outcome.receipt.exact
    assert rows(outcome, "resumed")


# ---- what is sent ----


def test_on_one_host_nothing_but_bells_is_sent(run):
    receipt = run(SIGNED, workers=2).receipt
    assert receipt.bytes_sent == 12 * 2 * 64
    assert receipt.bytes_plain == 0
