"""Lanes that train by themselves and agree now and then: the bits are those of one worker."""

import pytest

from shoal.jobs import commands
from tests.conftest import CNN, GPT, MLP, long_only
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
from tests.jobs.test_parameter_servers import InterruptAfterSave

PLAIN = {"kind": "local", "every": 4, "rounds_per_sync": 1}
STREAMED = {"kind": "local", "every": 4, "rounds_per_sync": 4}
AVERAGED = STREAMED | {"outer": "average"}
SMALL = MLP | {"steps": 24, "evaluate": {"every_steps": 12}, "sync": STREAMED}
PICTURES = CNN | {"steps": 16, "evaluate": {"every_steps": 8}, "sync": STREAMED, "lanes": 3}
LETTERS = GPT | {"steps": 18, "evaluate": {"every_steps": 9}, "sync": STREAMED}
LARGE = SMALL | {
    "model": {"name": "models.py:mlp", "args": {"inputs": 64, "classes": 10, "hidden": 800, "depth": 2}},
    "steps": 13,
    "sync": STREAMED | {"every": 3},
}


@pytest.fixture(autouse=True)
def limited_time():
    with time_limit(60):
        yield


# ---- the same bits ----


@pytest.mark.parametrize(
    "sync", [PLAIN, STREAMED, STREAMED | {"outer": "average"}], ids=["plain", "streamed", "average"]
)
@pytest.mark.parametrize("job", [SMALL, *long_only(PICTURES, LETTERS)], ids=["mlp", "cnn", "gpt"])
def test_any_number_of_workers_gives_the_same_bits(job, sync, run):
    job = job | {"sync": sync}
    for workers in (2, 3, 4)[: job["lanes"] - 1]:
        outcome = run(job, workers=workers)
        assert_same(outcome, reference_receipt(run, job))
        assert (outcome.receipt.exact, outcome.receipt.workers) == (True, workers)
    assert reference_receipt(run, job).weights_sha256 != reference_receipt(run, job, sync="lanes").weights_sha256


def test_what_is_chosen_counts(run):
    """Else the tests above say little."""
    kinds = [PLAIN, STREAMED, AVERAGED, STREAMED | {"momentum": 0.9}, STREAMED | {"every": 3}]
    assert len({reference_receipt(run, SMALL, sync=kind).weights_sha256 for kind in kinds}) == len(kinds)


@pytest.mark.parametrize(
    "codec",
    [
        "bf16",
        {"kind": "topk", "keep": 0.05},
        {"kind": "lowrank", "rank": 2},
        *long_only("int8", "fp16", "sign", "int4", "int3"),
    ],
)
def test_with_a_codec(codec, run):
    job = SMALL | {"codec": codec}
    for workers in (2, 3):
        assert_same(run(job, workers=workers), reference_receipt(run, job))


@pytest.mark.long
@pytest.mark.parametrize("codec", ["none", *long_only("lowrank", "int8", "sign", "topk")])
def test_in_several_fragments(codec, run):
    job = LARGE | {"codec": codec}
    for workers in (2, 3):
        assert_same(run(job, workers=workers), reference_receipt(run, job))


def test_a_loss_with_a_divisor_of_its_own_and_lanes_without_samples(run):
    """The last batch of 1438 samples has 2, for 8 lanes."""
    job = {k: v for k, v in SMALL.items() if k not in ("model", "loss", "metrics")}
    job |= {"task": "models.py:TokenTask", "lanes": 8, "batch_size": 359}
    assert_same(run(job, workers=3), reference_receipt(run, job))


@pytest.mark.parametrize("codec", ["none", "sign"])
def test_a_period_begins_with_lanes_that_have_no_samples(codec, run):
    """The fifth batch has 2 samples for 8 lanes, and the second period begins with it: fragments leave after it."""
    job = {k: v for k, v in SMALL.items() if k not in ("model", "loss", "metrics")}
    job |= {
        "task": "models.py:TokenTask",
        "lanes": 8,
        "batch_size": 359,
        "sync": {"kind": "local", "every": 1, "rounds_per_sync": 4},
    }
    job |= {"codec": codec, "steps": 12, "schedule": {"name": "StepLR", "args": {"step_size": 1}, "every": "epoch"}}
    assert_same(run(job, workers=3), reference_receipt(run, job))


def test_a_lane_whose_loss_is_not_finite_is_named_at_its_step(run):
    outcome = run(SMALL, optimizer={"name": "SGD", "args": {"lr": 1e30}})
    assert outcome.status == "failed"
    assert "SH403" in str(outcome.error)
    assert "the loss of lane " in str(outcome.error)
    assert int(str(outcome.error).rpartition(" at step ")[2].split()[0]) < 16, "and not at the agreement"


# ---- deaths ----

SCRIPTS = {
    "in the first round": ["kill worker 0 at step 2 in compute"],
    "while a fragment is on its way": ["kill worker 1 at step 5 in compute"],
    "while it waits for a fragment": ["kill worker 1 at step 8 in exchange"],
    "at an agreement": ["kill worker 1 at step 0 in exchange"],
    "after an agreement": ["kill worker 0 at step 16 in telling"],
    "in evaluation": ["kill worker 0 at step 16 in evaluation"],
    "one after the other": [f"kill worker {n} at step {4 * n + 3} in compute" for n in range(3)],
    "the last step": ["kill worker 2 at step 23 in compute"],
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_kills(name, run, job_dir):
    """What was done since the last agreement is done again."""
    lines = SCRIPTS[name]
    outcome = run(SMALL, workers=3, watchers=fault_script(job_dir, *lines), elastic={"restarts": 9})
    assert_same(outcome, reference_receipt(run, SMALL))
    assert fired_faults(job_dir) == set(lines), "else the test says nothing"
    assert not events_of_kind(outcome, "resumed"), "somebody was alive: its memory counts, not a file"


def test_a_newcomer_forgets_fragments_that_do_not_count(run, job_dir):
    """It comes in the first period and follows in the second, of which it has a fragment when a worker dies."""
    lines = [f"delay worker {n} at step {at} in compute by 1000 ms" for n in (0, 1) for at in (15, 25)]
    lines += ["kill worker 1 at step 27 in compute"]
    job = SMALL | {"steps": 48, "evaluate": {"every_steps": 48}}
    with background_run(run, job, workers=2, watchers=fault_script(job_dir, *lines), elastic={"balance": False}) as it:
        it.wait_for_workers(2)
        commands.scale(it.paths, 3)
    outcome = it.outcome.result()
    assert_same(outcome, reference_receipt(run, job))
    assert fired_faults(job_dir) == set(lines)
    views = [row["view"] for row in events_of_kind(outcome, "joined") if (row.who, row.step) == ("worker-2", 16)]
    assert views, "else the test says nothing"
    assert not events_of_kind(outcome, "caught_up"), "what it followed was enough"


@pytest.mark.parametrize("codec", [*long_only("int8"), "sign"])
def test_a_death_with_a_codec(codec, run, job_dir):
    """What a dead lane remembered is lost, as without local steps, and the receipt says so."""
    job = SMALL | {"codec": codec}
    outcome = run(job, workers=3, watchers=fault_script(job_dir, "kill worker 1 at step 21 in compute"))
    assert outcome.status == "finished", outcome.error
    if codec == "int8":
        assert_same(outcome, reference_receipt(run, job))
    else:
        assert not outcome.receipt.exact
        assert [row["worker"] for row in events_of_kind(outcome, "residual_lost")] != []


# ---- coming, going, saving ----


@pytest.mark.parametrize("codec", ["none", *long_only("sign")])
def test_workers_come_and_go(codec, run, job_dir):
    changes = {"steps": 400, "evaluate": {"every_steps": 150}, "codec": codec, "sync": STREAMED}
    enough = job_dir / "enough"
    watchers = [{"name": "delays.py:SlowSteps", "args": {"seconds": 0.1, "until": str(enough)}}]
    with background_run(run, MLP, workers=1, watchers=watchers, **changes) as it:
        it.wait_for_workers(1)
        commands.scale(it.paths, 3)
        it.wait_for_workers(3)
        seat, _ = commands.drain(it.paths, "worker-0")
        assert commands.wait_for_departure(it.paths, seat).startswith("left at step ")
        it.wait_for_workers(2)
        enough.touch()
    outcome = it.outcome.result()
    assert_same(outcome, reference_receipt(run, MLP, **changes))
    assert outcome.receipt.exact


def test_who_is_asked_to_leave_goes_at_the_next_agreement(run, job_dir):
    """And not at the one after it: a period may be long."""
    lines = [f"delay worker 0 at step {at} in compute by 1000 ms" for at in (3, 7, 11)]
    with background_run(run, SMALL, workers=2, steps=64, watchers=fault_script(job_dir, *lines)) as it:
        it.wait_for_workers(2)
        seat, _ = commands.drain(it.paths, "worker-1")
        assert commands.wait_for_departure(it.paths, seat) == "left at step 16"
    assert_same(it.outcome.result(), reference_receipt(run, SMALL, steps=64))


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_all_die_and_resume(codec, run, resume, job_dir):
    """From the newest checkpoint, which stands at an agreement. With codecs that remember, a worker may die while
    another saves what its lanes remember: then that is lost, as with any death."""
    job = SMALL | {"codec": codec, "steps": 40}
    watchers = fault_script(job_dir, *(f"kill worker {n} at step 34 in compute" for n in (0, 1)))
    watchers.append({"name": "delays.py:SlowSteps", "args": {"seconds": 0.2}})  # one save at least is done
    saves = {"every": "1 steps", "keep_best": 0}
    first = run(job, workers=2, watchers=watchers, elastic={"restarts": 0}, checkpoint=saves)
    assert first.status == "failed"
    second = resume(first.paths)
    (row,) = events_of_kind(second, "resumed")
    assert row.step in (16, 32)
    assert_same(second, reference_receipt(run, job))


@pytest.mark.parametrize("codec", ["sign", *long_only("int3", {"kind": "lowrank", "rank": 2})])
def test_a_stopped_run_resumes_with_its_residuals(codec, run, resume):
    job = SMALL | {"codec": codec, "steps": 240}
    first = run(job, workers=2, checkpoint={"every": "16 steps"}, look=InterruptAfterSave(32))
    assert first.status != "finished"
    second = resume(first.paths)
    (row,) = events_of_kind(second, "resumed")
    assert 32 <= row.step < 240
    assert_same(second, reference_receipt(run, job))


def test_evaluations_that_fall_between_agreements_are_announced(run):
    """Every 16 steps is often enough for one job, and not for the other."""

    def told(**changes):
        return [
            row["message"]
            for row in events_of_kind(run(SMALL, **changes), "note")
            if "agree every 16" in row["message"]
        ]

    assert told(evaluate={"every_steps": 12}) != []
    assert told(evaluate={"every_steps": 16}) == []


def test_nothing_is_left(run):
    outcome = run(SMALL, workers=3)
    assert_nothing_left(outcome)
    assert outcome.receipt.steps == 24
