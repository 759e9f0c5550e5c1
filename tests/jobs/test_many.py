"""Many workers give the bits of one, whatever happens to them."""

import os
import random
import signal
import threading

import pytest

from shoal.checkpoint.export import load_weights
from shoal.jobs import drive
from shoal.spec.load import make_job
from tests.conftest import CNN, GPT, MLP
from tests.jobs.disturbed import (
    JOBS,
    assert_nothing_left,
    assert_same,
    calm,
    fired,
    rows,
    script,
)

TOO_LONG_S = 60
RESTARTS = {"kind": "local", "restarts": 9}


@pytest.fixture(autouse=True)
def in_time():
    """A run that stands still for ever is a failure like others."""

    def too_long(*_):
        raise TimeoutError(f"not finished in {TOO_LONG_S} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(TOO_LONG_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# ---- any number of workers ----


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("workers", [2, 3, 4, 5, 8])
def test_any_number_of_workers_gives_the_same_bits(name, workers, run):
    outcome = run(JOBS[name], workers=workers, lanes=8)
    assert_same(outcome, calm(run, JOBS[name], lanes=8))
    assert outcome.receipt.workers == workers
    assert_nothing_left(outcome)


@pytest.mark.parametrize("lanes", [3, 5, 7])
def test_lanes_that_are_no_power_of_two(lanes, run):
    assert_same(run(JOBS["cnn"], workers=3, lanes=lanes), calm(run, JOBS["cnn"], lanes=lanes))


def test_half_precision(run):
    job = MLP | {"precision": "bf16", "steps": 6, "lanes": 4}
    assert_same(run(job, workers=3), calm(run, job))


def test_short_last_batches_and_several_epochs(run):
    """1438 samples in batches of 400: the last has 238, and some of its 7 lanes fewer than others."""
    job = {k: v for k, v in CNN.items() if k not in ("steps", "evaluate")}
    job |= {"epochs": 3, "batch_size": 400, "lanes": 7}
    outcome = run(job, workers=4)
    assert_same(outcome, calm(run, job))
    assert outcome.receipt.samples_seen == 3 * 1438


def test_workers_without_samples(run):
    """The last batch of 1438 samples has 2, for 8 lanes."""
    job = MLP | {"batch_size": 359, "lanes": 8, "steps": 10}
    assert_same(run(job, workers=8), calm(run, job))


def test_a_loss_with_a_divisor_of_its_own(run):
    job = {k: v for k, v in MLP.items() if k not in ("model", "loss", "metrics")}
    job |= {"task": "models.py:TokenTask", "lanes": 5, "steps": 20}
    assert_same(run(job, workers=3), calm(run, job))


# ---- faults ----

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
    "a newcomer while it catches up": ["kill worker 2 at step 4 in compute", "kill worker 3 while catching up"],
    "a newcomer after it caught up": ["kill worker 2 at step 4 in compute", "kill worker 3 while joining"],
    "the source": ["kill worker 2 at step 4 in compute", "kill worker 0 while source"],
    "all sources in turn": ["kill worker 2 at step 4 in compute", *(f"kill worker {n} while source" for n in (0, 1))],
    "the source and a newcomer": [
        "kill worker 1 at step 4 in compute", "kill worker 0 while source after 1 ms",
        "kill worker 3 while catching up after 1 ms",
    ],
    "in a save": ["kill worker 0 in save"],
    "in the middle of a save": ["kill worker 0 in save after 2 ms", "kill worker 1 in save after 2 ms"],
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_kills(name, run, place):
    job = JOBS["gpt"] | {"evaluate": {"every_steps": 5}, "lanes": 6}
    lines = SCRIPTS[name]
    saves = {"every": "3 steps" if "save" in name else "never", "keep_best": 0}
    outcome = run(job, workers=3, watch=script(place, *lines), engine=RESTARTS, checkpoint=saves)
    assert_same(outcome, calm(run, job))
    assert lines[0] in fired(place)
    assert not rows(outcome, "resumed"), "somebody was alive: its memory counts, not a file"
    assert_nothing_left(outcome)
