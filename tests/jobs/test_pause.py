"""A run that pauses at a step and goes on later has the bits of one that never paused."""

import copy

import pytest

from shoal.events import read_events
from shoal.jobs.run_executor import open_executor
from shoal.spec.load import make_job
from tests.conftest import MLP, long_only
from tests.jobs.fault_injection import assert_nothing_left, time_limit

JOB = MLP | {"steps": 60, "evaluate": {"every_steps": 20}, "lanes": 2}
LOCAL = {"sync": {"kind": "local", "every": 5, "rounds_per_sync": 1}}
SERVERS = {"sync": {"kind": "server", "servers": 2}, "workers": 2}
SHARDS = {"shard": {"kind": "fsdp", "size": 2}, "workers": 2}
CODEC = {"codec": "int4", "workers": 2}
FOLDS = {"data": MLP["data"] | {"split": {"kind": "stratified", "folds": 3}}, "steps": 12}


@pytest.fixture(autouse=True)
def limited_time():
    with time_limit(150):
        yield


@pytest.fixture
def executor(fork_server):
    with open_executor(fork_server) as made:
        yield made


@pytest.fixture
def train(executor, job_dir):
    """Runs a job, pausing at each of the steps."""

    def go(job, *, pauses=(), **changes):
        made = make_job(copy.deepcopy(job) | changes, base_dir=str(job_dir))
        stops = [*pauses, None]
        handle = executor.submit(made, runs=job_dir / "pausing", until=stops[0])
        executor.run_until_done(handle)
        for stop in stops[1:]:
            result = handle.result()
            assert (result.status, result.error) == ("paused", None)
            assert_nothing_left(result)
            handle = executor.submit_resume(result.paths, until=stop)
            executor.run_until_done(handle)
        return handle.result()

    return go


def evaluations(paths):
    """Steps and metrics of the validation data. A row that is told again says the same."""
    rows = [e for e in read_events(paths.events) if e.kind == "evaluated" and e["split"] == "validation"]
    found = {}
    for row in rows:
        assert found.setdefault(row.step, row["metrics"]) == row["metrics"]
    return found


@pytest.mark.parametrize(
    "kind",
    [{}, *long_only({"workers": 2}, LOCAL, LOCAL | {"workers": 2}, SERVERS, SHARDS, CODEC)],
    ids=["lanes", "two workers", "local", "local with two workers", "servers", "shards", "codec"],
)
def test_a_paused_run_has_the_bits_of_one_that_never_paused(kind, train):
    undisturbed, paused = train(JOB, **kind), train(JOB, pauses=[20, 40], **kind)
    assert paused.receipt.state_sha256 == undisturbed.receipt.state_sha256
    assert paused.receipt.metrics == undisturbed.receipt.metrics
    assert evaluations(paused.paths) == evaluations(undisturbed.paths)


@pytest.mark.parametrize("where", ["step 20", "evaluation", *long_only("step 19", "step 21")])
def test_a_kill_at_the_pause_changes_nothing(where, train, job_dir):
    kill = {"name": "faults.py:KillAtEvaluation", "args": {"part": "validation", "step": 20, "marks": str(job_dir)}}
    if where.startswith("step"):
        kill = {"name": "faults.py:KillAt", "args": {"steps": [int(where[5:])], "marks": str(job_dir)}}
    disturbed = train(JOB, pauses=[20], watchers=[kill], elastic={"restarts": 3})
    assert disturbed.receipt.deaths_survived == 1
    assert disturbed.receipt.state_sha256 == train(JOB).receipt.state_sha256
    assert evaluations(disturbed.paths).keys() == {20, 40, 60}


def test_all_workers_stop_at_the_same_step(train, executor, job_dir):
    handle = executor.submit(
        make_job(copy.deepcopy(JOB) | {"workers": 2}, base_dir=str(job_dir)), runs=job_dir / "pausing", until=20
    )
    executor.run_until_done(handle)
    left = [event for event in read_events(handle.result().paths.events) if event.kind == "left"]
    assert len({event.who for event in left}) == 2
    assert {(event.step, event["why"]) for event in left} == {(20, "paused")}


def test_a_pause_between_evaluations_comes_after_the_next_one(executor, job_dir):
    handle = executor.submit(make_job(copy.deepcopy(JOB), base_dir=str(job_dir)), runs=job_dir / "pausing", until=21)
    executor.run_until_done(handle)
    assert (handle.result().status, handle.result().saved_step) == ("paused", 40)


@pytest.mark.long
def test_a_job_with_folds_pauses_between_folds(train):
    undisturbed, paused = train(JOB, **FOLDS), train(JOB, pauses=[1, 2], **FOLDS)
    assert [r.weights_sha256 for r in paused.receipts] == [r.weights_sha256 for r in undisturbed.receipts]
    assert len(paused.receipts) == 3
