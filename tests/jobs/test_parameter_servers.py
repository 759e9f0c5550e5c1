"""Training over parameter servers: with staleness 0 the bits of lanes, whoever dies; above it, what was promised."""

import os
import random
import signal

import pytest

from shoal.checkpoint.manifest import list_manifests
from shoal.events import read_events
from shoal.spec.job import Job
from shoal.spec.load import load_job, save_job
from tests.conftest import long_only
from tests.jobs.fault_injection import (
    JOBS,
    assert_nothing_left,
    assert_same,
    events_of_kind,
    fault_script,
    fired_faults,
    reference_receipt,
    time_limit,
)


def server_sync(servers=2, backups=1, staleness=0, **more):
    return {"kind": "server", "servers": servers, "backups": backups, "staleness": staleness, **more}


@pytest.fixture(autouse=True)
def limited_time():
    with time_limit(120):
        yield


def lanes_receipt(run, job, **changes):
    """What `sync: lanes` gives on one worker."""
    return reference_receipt(run, {k: v for k, v in job.items() if k != "sync"}, **changes)


class ServerKiller:
    """Kills a server, or several at once, when so many steps were told and every server is in its place again."""

    def __init__(self, *steps, copies=2, seed=0, at_once=1):
        self.steps = list(steps)
        self.rng = random.Random(seed)
        self.kills_at_once = at_once
        self.copies = copies
        self.killed = 0
        self.pids = {}
        self.fully_replicated = False

    def __call__(self, paths, event, run_state):
        if event.kind == "server_started":
            self.pids[event["server"]] = event["pid"]
        elif event.kind == "server_died":
            self.pids.pop(event["server"], None)
        elif event.kind == "chunk_table":
            self.fully_replicated = event["copies"] == self.copies
        elif event.kind == "step" and self.fully_replicated and self.steps and event.step >= self.steps[0]:
            self.steps.pop(0)
            self.fully_replicated = False
            for name in self.rng.sample(sorted(self.pids), self.kills_at_once):
                os.kill(self.pids.pop(name), signal.SIGKILL)
                self.killed += 1


class InterruptAfterSave:
    """Ctrl-C, once, when this step or a later one was saved."""

    def __init__(self, step):
        self.step = step

    def __call__(self, paths, event, run_state):
        if event.kind == "saved" and event.step >= self.step:
            self.step = float("inf")
            os.kill(os.getpid(), signal.SIGINT)


# ---- staleness 0 ----


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize(("workers", "servers", "backups"), [*long_only((1, 1, 0)), (3, 2, 1), *long_only((2, 3, 2))])
def test_the_bits_of_lanes(name, workers, servers, backups, run):
    outcome = run(JOBS[name], workers=workers, sync=server_sync(servers, backups))
    assert_same(outcome, lanes_receipt(run, JOBS[name]))
    assert outcome.receipt.exact
    assert_nothing_left(outcome)


def test_short_batches_value_clipping_and_groups(run):
    job = JOBS["cnn"] | {"batch_size": 400, "lanes": 7, "steps": 9, "clip": {"value": 0.01}}
    job["optimizer"] = {"name": "Adam", "args": {"lr": 0.01}, "groups": [{"match": "*bias", "args": {"lr": 0.1}}]}
    assert_same(run(job, workers=3, sync=server_sync(2)), lanes_receipt(run, job))


@pytest.mark.parametrize("seed", [0, *long_only(1, 2, 3)])
def test_servers_die_and_nothing_is_lost(seed, run):
    job = JOBS["mlp"] | {"steps": 200}
    killer = ServerKiller(20, 90, 150, seed=seed)
    outcome = run(job, workers=2, sync=server_sync(3), look=killer)
    assert_same(outcome, lanes_receipt(run, job))
    assert killer.killed == 3
    assert len(events_of_kind(outcome, "server_died")) == 3
    assert_nothing_left(outcome)


def test_two_servers_at_once_with_two_backups(run):
    job = JOBS["gpt"] | {"steps": 60}
    outcome = run(job, workers=2, sync=server_sync(4, 2), look=ServerKiller(15, 40, copies=3, at_once=2))
    assert_same(outcome, lanes_receipt(run, job))


def test_without_backup_the_checkpoint_is_used(run):
    job = JOBS["mlp"] | {"steps": 120, "checkpoint": {"every": "10 steps"}}
    outcome = run(job, workers=2, sync=server_sync(2, 0), look=ServerKiller(60, copies=1), elastic={"restarts": 3})
    assert_same(outcome, lanes_receipt(run, job))
    assert events_of_kind(outcome, "servers_lost")


def test_workers_die_too(job_dir, run):
    job = JOBS["cnn"] | {"steps": 40}
    lines = ["kill worker 0 at step 7 in exchange", "kill worker 1 at step 16 in compute"]
    outcome = run(
        job, workers=3, sync=server_sync(2), watchers=fault_script(job_dir, *lines), look=ServerKiller(10, 25)
    )
    assert_same(outcome, lanes_receipt(run, job))
    assert len(fired_faults(job_dir)) == 2


# ---- checkpoints ----


@pytest.mark.parametrize(
    ("before", "after"),
    [(server_sync(2), server_sync(3, 0)), *long_only((server_sync(1, 0), None), (None, server_sync(2)))],
)
def test_resume_with_other_servers(before, after, run, resume, job_dir):
    """From servers to more of them, to none, and from none to some."""
    job = JOBS["cnn"] | {"steps": 150, "checkpoint": {"every": "5 steps"}}
    sync = {} if before is None else {"sync": before}

    first = run(job | sync, workers=2, look=InterruptAfterSave(10))
    assert first.status != "finished"
    assert list_manifests(str(first.paths.checkpoints))
    plain = load_job(first.paths.job).dump() | {"sync": after or {"kind": "lanes"}}
    save_job(Job.model_validate(plain), first.paths.job)
    assert_same(resume(first.paths), lanes_receipt(run, job))


# ---- above 0 ----

GENTLE = JOBS["mlp"] | {"optimizer": {"name": "SGD", "args": {"lr": 0.002, "momentum": 0.9}}}


@pytest.mark.parametrize("staleness", [1, 4, "inf"])
def test_lanes_that_go_their_own_way(staleness, run):
    job = GENTLE | {"steps": 80, "faults": {"pause_probability": 0.1, "pause_s": 0.02}}
    outcome = run(job, workers=4, sync=server_sync(2, 1, staleness))
    assert outcome.status == "finished", outcome.error
    assert not outcome.receipt.exact
    assert outcome.receipt.metrics["accuracy"] > 0.8
    assert outcome.receipt.samples_seen == lanes_receipt(run, GENTLE, steps=80).samples_seen
    assert {e.step for e in read_events(outcome.paths.events) if e.kind == "evaluated"} == {20, 40, 60, 80}


def test_stale_through_deaths(job_dir, run):
    job = GENTLE | {"steps": 120}
    lines = ["kill worker 1 at step 30 in exchange"]
    outcome = run(
        job, workers=3, sync=server_sync(3, 1, 2), watchers=fault_script(job_dir, *lines), look=ServerKiller(20, 70)
    )
    assert outcome.status == "finished", outcome.error
    assert outcome.receipt.metrics["accuracy"] > 0.8


def test_a_stale_run_is_resumed(run, resume):
    job = GENTLE | {"steps": 100, "checkpoint": {"every": "10 steps"}, "sync": server_sync(2, 1, 4)}

    first = run(job, workers=2, look=InterruptAfterSave(30))
    second = resume(first.paths)
    assert second.status == "finished", second.error
    assert second.receipt.metrics["accuracy"] > 0.8
