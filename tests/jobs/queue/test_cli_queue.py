"""The verbs of the queue, without a daemon: what they print, and what they refuse."""

import json
import time

import pytest
from typer.testing import CliRunner

from shoal import cli
from shoal.errors import ShoalError
from shoal.jobs.queue import client, queue_store, serve
from shoal.plan.queueing import transitions
from shoal.spec.load import save_job


@pytest.fixture
def shoal(paths, monkeypatch):
    """Run a verb on the queue of this test. No daemon is started."""
    monkeypatch.setattr(client, "ensure_served", lambda paths: False)

    def go(*words):
        done = CliRunner().invoke(cli.app, [*map(str, words), "--runs", str(paths.runs)])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.stdout

    return go


@pytest.fixture
def job_file(job, tmp_path):
    save_job(job(name="digits", workers="1..2"), tmp_path / "job.yaml")
    return tmp_path / "job.yaml"


def code_of(call, *words):
    with pytest.raises(ShoalError) as caught:
        call(*words)
    return caught.value.code


def test_a_job_is_submitted_listed_explained_and_cancelled(shoal, job_file):
    made = json.loads(shoal("submit", job_file, "--priority", 5, "--user", "ann", "--set", "seed=3", "--json"))
    assert (made["id"], made["priority"], made["user"], made["state"]) == (1, 5, "ann", "waiting")
    assert "job 2 (digits) is waiting" in shoal("submit", job_file, "--after", 1)
    listed = shoal("queue")
    assert "no daemon" in listed
    assert "2 waiting" in listed
    assert "it comes after 1 (waiting)" in shoal("queue", "--why", 2)
    rows = json.loads(shoal("queue", "--json"))
    assert [row["id"] for row in rows] == [1, 2]
    assert "workers over" not in shoal("top", "--once")
    assert "is cancelled" in shoal("cancel", 1)
    assert "job 1, which it comes after, was cancelled" in shoal("queue", "--why", 2)
    assert "no daemon serves the queue" in shoal("down")


def test_mistakes_have_codes(shoal, job_file):
    assert code_of(shoal, "queue", "--why", 7) == "SH646"
    assert code_of(shoal, "cancel", 7) == "SH646"
    shoal("submit", job_file)
    assert code_of(shoal, "cancel", 7) == "SH646"
    assert code_of(shoal, "release", 1) == "SH647"
    assert code_of(shoal, "submit", job_file, "--priority", 1000) == "SH609"
    assert code_of(shoal, "submit", job_file, "--user", "a\nb") == "SH609"
    assert code_of(shoal, "submit", job_file, "--after", 9) == "SH646"
    assert code_of(shoal, "up", "--quota", "ann") == "SH609"
    assert code_of(shoal, "up", "--policy", "magic") == "SH609"
    assert code_of(shoal, "up", "--engine", "warp") == "SH609"


def test_a_job_with_mistakes_is_not_submitted(shoal, job_file):
    job_file.write_text(job_file.read_text().replace("batch_size: 50", "batch_size: -1"))
    assert code_of(shoal, "submit", job_file).startswith("SH1")
    assert "the queue is empty" in shoal("queue")


def test_the_picture_shows_who_had_workers_when(shoal, store, job):
    store.submit([job(), job()], user="ann")
    store.change_lease(lambda old: old.taken(holder="x", pid=1))
    for number in (1, 2):
        store.apply(number, lambda e: transitions.claim(e, epoch=1, run=f"r{e.id}"))
        store.apply(number, lambda e: transitions.resize(e, epoch=1, workers=e.id, why="there is room"))
    shown = shoal("top", "--once")
    assert "full height: 2" in shown
    assert "there is room" in shown
    assert "no daemon lives" in shown


def test_the_picture_outlives_a_clock_that_is_set(shoal, store, job, monkeypatch):
    """Forward by a day, then back by a year."""
    store.submit([job()], user="ann")
    store.change_lease(lambda old: old.taken(holder="x", pid=1))
    store.apply(1, lambda e: transitions.claim(e, epoch=1, run="r1"))
    now = time.time()
    for workers, jump in enumerate((0.0, 86_400.0, -365 * 86_400.0, -365 * 86_400.0 + 5), start=1):
        monkeypatch.setattr(queue_store.time, "time", lambda jump=jump: now + jump)
        store.apply(1, lambda e, n=workers: transitions.resize(e, epoch=1, workers=n, why="there is room"))
    assert "full height: 4" in shoal("top", "--once")
    assert shoal("queue", "--why", 1).count("there is room") >= 4


def test_a_held_job_is_released(shoal, store, job):
    store.submit([job()], user="ann")
    store.change_lease(lambda old: old.taken(holder="x", pid=1))
    store.apply(1, lambda e: transitions.claim(e, epoch=1, run="r"))
    store.apply(1, lambda e: transitions.stop(e, epoch=1, why="its run was stopped"))
    assert "its run was stopped" in shoal("queue")
    assert "is waiting" in shoal("release", 1)


def test_quotas_are_parsed():
    assert serve.parse_quotas(["ann=4", "bob=none"]) == {"ann": 4, "bob": None}
