"""Workers that are killed, wherever they are: the others go on, and the bits are those of one."""

import random

import pytest

from shoal.checkpoint.export import load_weights
from tests.conftest import long_only
from tests.jobs.fault_injection import (
    JOBS,
    assert_nothing_left,
    assert_same,
    events_of_kind,
    fault_script,
    fired_faults,
    open_resources,
    reference_receipt,
)

pytestmark = pytest.mark.usefixtures("limited_time")
RESTARTS = {"restarts": 9}


SCRIPTS = {
    "in compute": ["kill worker 0 at step 9 in compute"],
    "in data": ["kill worker 2 at step 9 in data"],
    "in exchange": ["kill worker 2 at step 7 in exchange"],
    "in the middle of an exchange": ["kill worker 1 at step 7 in exchange after 1 ms"],
    "before applying": ["kill worker 1 at step 6 while applying"],
    "all but one before applying": [f"kill worker {n} at step 6 while applying" for n in (0, 1)],
    "after the commit": ["kill worker 0 at step 6 in telling"],
    "the first step": ["kill worker 0 at step 0 in compute"],
    "before the first step": ["kill worker 1 while joining"],
    "the last step": ["kill worker 0 at step 13 in exchange", "kill worker 2 at step 13 in exchange after 1 ms"],
    "after the last step": ["kill worker 1 at step 14 in telling"],
    "in evaluation": ["kill worker 1 at step 10 in evaluation"],
    "the saver in evaluation": ["kill worker 0 at step 10 in evaluation"],
    "in the gathering of an evaluation": ["kill worker 1 at step 10 in exchange"],
    "in export": ["kill worker 0 in export"],
    "in export, twice": ["kill worker 0 in export", "kill worker 1 in export"],
    "while others wait for the export": ["kill worker 0 in export", "kill worker 2 at step 14 in exchange after 1 ms"],
    "two at once": ["kill worker 0 at step 7 in compute", "kill worker 1 at step 7 in compute"],
    "one after the other": [f"kill worker {n} at step {4 + n} in exchange" for n in range(5)],
    "in building": ["kill worker 1 at step 4 in compute", "kill worker 3 at step 0 in building"],
    "a newcomer while it follows": ["kill worker 2 at step 4 in compute", "kill worker 3 in following"],
    "a newcomer when it joins": ["kill worker 2 at step 4 in compute", "kill worker 3 while joining"],
    "whom newcomers follow": ["kill worker 2 at step 4 in compute", "kill worker 1 while feeding"],
    "whom they follow, then a newcomer that catches up": [
        "kill worker 2 at step 4 in compute", "kill worker 1 while feeding", "kill worker 3 while catching up",
    ],
    "in a save": ["kill worker 0 in save"],
    "in the middle of a save": ["kill worker 0 in save after 2 ms", "kill worker 1 in save after 2 ms"],
}  # fmt: skip
LONG = ["in data", "in export, twice", "in building", "a newcomer when it joins", "whom newcomers follow", "in a save"]


@pytest.mark.parametrize("name", [*long_only(*LONG), *(name for name in SCRIPTS if name not in LONG)])
def test_kills(name, run, job_dir):
    """Steps are slow enough for newcomers to come in."""
    job = JOBS["gpt"] | {"evaluate": {"every_steps": 5, "batch_size": 4}, "lanes": 6}
    lines = SCRIPTS[name]
    saves = {"every": "3 steps" if "save" in name else "never", "keep_best": 0}
    watchers = fault_script(job_dir, *lines)
    if any("worker 3" in line or "feeding" in line for line in lines):
        watchers.append({"name": "delays.py:SlowSteps", "args": {"seconds": 0.2}})
    outcome = run(job, workers=3, watchers=watchers, elastic=RESTARTS, checkpoint=saves)
    assert_same(outcome, reference_receipt(run, job))
    assert fired_faults(job_dir) == set(lines), "else the test says nothing"
    assert not events_of_kind(outcome, "resumed"), "somebody was alive: its memory counts, not a file"
    assert_nothing_left(outcome)


def test_metrics_are_reported_although_the_reporter_died(run, job_dir):
    job = JOBS["mlp"] | {
        "evaluate": {"every_steps": 12},
        "lanes": 6,
        "best": {"metric": "KillingMetric", "mode": "min"},
    }
    job["metrics"] = [{"name": "models.py:KillingMetric", "args": {"marks": str(job_dir)}}]
    outcome = run(job, workers=3, elastic=RESTARTS)
    told = events_of_kind(outcome, "evaluated")
    assert [(row.step, row.get("again", False)) for row in told] == [(12, True), (24, False)]
    assert_same(outcome, reference_receipt(run, job))
    assert outcome.receipt.best["step"] == 12
    assert 12 in {row.step for row in events_of_kind(outcome, "saved")}, "the best is kept"


@pytest.mark.long
def test_many_kills_leave_no_memory_behind(run, job_dir):
    """Many views later a worker has its own arena and those of two peers, and few sockets."""
    seen = []

    def look(paths, event, run_state):
        if event.kind == "evaluated" and event.step == 300:
            seen.append(open_resources(run_state.workers[event.who].pid))

    lines = [f"kill worker {n} in exchange after 20 ms" for n in range(1, 7)]
    job = JOBS["mlp"] | {"evaluate": {"every_steps": 300}, "lanes": 6, "steps": 310}
    outcome = run(job, look=look, workers=3, watchers=fault_script(job_dir, *lines), elastic=RESTARTS)
    assert_same(outcome, reference_receipt(run, job))
    assert outcome.receipt.deaths_survived >= 4
    assert seen[0]["mapped"] <= 3
    assert seen[0]["arenas"] <= 4, "Python keeps a descriptor for each that it maps"
    assert seen[0]["sockets"] <= 20


def test_when_all_die_the_checkpoint_counts(run, job_dir):
    job = JOBS["mlp"] | {"lanes": 6}
    lines = ["delay worker 0 at step 11 in data by 2000 ms", "kill all at step 12"]  # a save takes its time
    outcome = run(
        job, workers=3, watchers=fault_script(job_dir, *lines), elastic=RESTARTS, checkpoint={"every": "5 steps"}
    )
    assert_same(outcome, reference_receipt(run, job))
    (row,) = events_of_kind(outcome, "resumed")
    assert row.step in (5, 10), "the last save may have been in the making"
    assert outcome.receipt.deaths_survived == 3


def test_when_all_die_and_nothing_is_saved_it_begins_again(run, job_dir):
    job = JOBS["mlp"] | {"lanes": 6}
    outcome = run(job, workers=3, watchers=fault_script(job_dir, "kill all at step 12"), elastic=RESTARTS)
    assert_same(outcome, reference_receipt(run, job))
    assert not events_of_kind(outcome, "resumed")


def test_nothing_is_left_of_a_run_that_failed(run, job_dir):
    kill = fault_script(job_dir, "kill all at step 5")
    outcome = run(JOBS["mlp"], workers=3, lanes=6, watchers=kill, elastic={"restarts": 0})
    assert outcome.error.code == "SH603"
    assert_nothing_left(outcome)


def test_an_error_in_the_model_ends_all_workers(run):
    outcome = run(JOBS["mlp"], workers=3, lanes=6, model={"name": "models.py:NanOutput"})
    assert outcome.error.code == "SH403"
    assert_nothing_left(outcome)


def test_a_step_that_does_not_count_leaves_running_statistics_as_they_were(run, job_dir):
    """The others had moved theirs when it died; the step is done again from where it began."""
    lines = ["kill worker 1 at step 7 in compute", "kill worker 2 at step 15 in compute"]
    outcome = run(JOBS["cnn"], workers=3, lanes=6, watchers=fault_script(job_dir, *lines))
    assert events_of_kind(outcome, "stopped")
    assert_same(outcome, reference_receipt(run, JOBS["cnn"], lanes=6))


@pytest.mark.parametrize("seed", [0, *long_only(1, 2)])
def test_every_sample_is_seen_exactly_once_per_epoch(seed, run, job_dir):
    """Weights that count: 512 samples, two epochs and a half, kills wherever the seed says."""
    rng = random.Random(seed)
    phases = ("in data", "in compute", "in exchange", "while applying", "in telling", "in exchange after 1 ms")
    lines = [f"kill worker {n} at step {rng.randint(0, 19)} {rng.choice(phases)}" for n in range(6)]
    (job_dir / "samples.csv").write_text("number,y\n" + "".join(f"{n},0\n" for n in range(512)))
    job = {
        "name": "tally",
        "task": {"name": "models.py:SampleCounter", "args": {"samples": 512}},
        "optimizer": {"name": "SGD", "args": {"lr": 64.0}},
        "data": {"source": {"kind": "csv", "path": "samples.csv", "target": "y"}, "split": "none"},
        "batch_size": 64,
        "steps": 20,
        "lanes": 5,
        "export": [],
        "checkpoint": {"every": "never"},
    }
    outcome = run(job, workers=4, watchers=fault_script(job_dir, *lines), elastic=RESTARTS)
    assert outcome.status == "finished", outcome.error
    weights = load_weights(outcome.paths.model)
    times = weights["times"].long()
    assert sorted(times.tolist()) == [2] * 256 + [3] * 256, f"{lines}"
    assert int(weights["total"]) == sum(number * int(count) for number, count in enumerate(times))
