"""Searches in the queue: the journal and winner of a search that runs alone, however the queue moves its workers."""

import contextlib
import sqlite3

import pytest

from shoal.errors import ShoalError
from shoal.jobs.queue import client, daemon, queue_file
from shoal.jobs.queue.queue_store import QueueStore
from shoal.jobs.search.driver import run_search
from shoal.jobs.search.receipt import read_receipt
from shoal.jobs.search.search_dir import SearchPaths
from shoal.plan.queueing import transitions
from shoal.plan.queueing.work import SearchWork
from shoal.spec.run_paths import RunPaths
from tests.jobs.queue.test_daemon import Chosen, Restless, all_ended, serve, state_of, tick_until
from tests.jobs.search.conftest import SEARCH

__all__ = ["serve"]
SHORT = {"name": "small", "steps": 8, "evaluate": {"every_steps": 4}, "lanes": 2, "metrics": ["accuracy"]}
SEARCHED = SHORT | {"workers": "1..3", "search": SEARCH}


@pytest.fixture
def searched(job):
    def make(**changes):
        return job(**{**SEARCHED, **changes})

    return make


def receipt_of(paths, entry):
    return read_receipt(SearchPaths(RunPaths.at(paths.runs / entry.run)).receipt)


@pytest.mark.long
def test_a_search_whose_workers_change_again_and_again_decides_and_finds_the_same(
    store, paths, job, searched, serve, fork_server, monkeypatch
):
    monkeypatch.setattr(daemon, "DECIDE_S", 0.7)
    made = searched(search=SEARCH | {"policy": {"kind": "promote", "sampler": "random", "first": 1}, "slots": 3})
    alone = run_search(made, runs=paths.runs.parent / "alone", workers=1, fork_server=fork_server)
    store.submit([made], user="ann", work=SearchWork())
    store.submit([job(steps=40)], user="bob")
    tick_until(serve(Restless(), cores=6), all_ended(store))
    entry = store.get(1)
    assert [one.state for one in store.entries()] == ["finished", "finished"], entry.reason
    found = receipt_of(paths, entry)
    assert found.search_sha256 == alone.receipt.search_sha256
    assert found.weights_sha256 == alone.receipt.weights_sha256
    assert len({row.workers for row in store.history(1) if row.workers}) > 1, "it was never resized"


def test_a_search_that_loses_its_daemon_and_its_workers_goes_on_where_it_was(
    store, paths, searched, serve, fork_server
):
    made = searched()
    alone = run_search(made, runs=paths.runs.parent / "alone", workers=1, fork_server=fork_server)
    store.submit([made], user="ann", work=SearchWork())
    policy = Chosen()
    policy.shares = {1: 2}
    first = serve(policy)
    tick_until(first, lambda: first._attempts and first._attempts[1].progressed)
    first.executor.close()
    second = serve(policy)
    tick_until(second, lambda: state_of(store, 1) == "running")
    policy.shares = {}
    second._next_decision_s = 0.0
    tick_until(second, lambda: state_of(store, 1) == "waiting")
    policy.shares = {1: 1}
    second._next_decision_s = 0.0
    tick_until(second, all_ended(store))
    entry = store.get(1)
    assert (entry.state, entry.attempts) == ("finished", 3), entry.reason
    assert receipt_of(paths, entry).search_sha256 == alone.receipt.search_sha256
    assert len(list(paths.runs.glob("small-*"))) == 1


def test_a_job_without_a_search_is_refused_before_anything_is_written(paths, job):
    with pytest.raises(ShoalError) as caught:
        client.submit([job()], runs=paths.runs, work=SearchWork(), start=False)
    assert caught.value.code == "SH104"
    assert client.look(paths.runs).entries == {}


def test_a_search_may_grow_as_far_as_its_job_allows(store, searched):
    (entry,) = store.submit([searched()], user="ann", work=SearchWork())
    assert (entry.kind, entry.needs.least, entry.needs.most) == ("search", 1, 3)


def test_a_search_gets_the_workers_of_its_largest_trial(store, searched):
    space = {"shard": ["none", {"kind": "fsdp", "size": 2}]}
    (entry,) = store.submit([searched(workers=2, search=SEARCH | {"space": space})], user="ann", work=SearchWork())
    assert (entry.needs.least, entry.needs.gang, entry.needs.most) == (2, 2, 2)


def test_a_queue_of_the_first_version_is_brought_to_the_present_one(paths, job):
    with QueueStore(paths) as store:
        (entry,) = store.submit([job()], user="ann")
    with contextlib.closing(sqlite3.connect(paths.file)) as old:
        old.execute("ALTER TABLE job DROP COLUMN kind")
        old.execute("ALTER TABLE job DROP COLUMN fruitless")
        old.execute("ALTER TABLE job_file DROP COLUMN work")
        old.execute("DROP TABLE planned_speed")
        old.execute("PRAGMA user_version=1")
        old.commit()
    with QueueStore(paths) as store:
        assert store.get(entry.id) == entry
        store.apply(entry.id, transitions.request_cancel)
        store.submit([job()], user="ann")
        store.set_planned_speeds("abc", {1: 2.0})
    with contextlib.closing(sqlite3.connect(paths.file)) as new:
        assert new.execute("PRAGMA user_version").fetchone() == (queue_file.SCHEMA_VERSION,)
