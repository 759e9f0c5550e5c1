"""What a daemon has begun goes on where the next daemon runs jobs."""

import pytest

from shoal.jobs.resume import load_moved
from shoal.jobs.run_executor import run
from shoal.jobs.search.driver import run_search
from shoal.jobs.search.search_dir import SearchPaths
from shoal.plan.queueing.work import SearchWork
from shoal.spec.engine import LocalEngineConfig
from shoal.spec.load import load_run_job, save_job
from shoal.spec.run_paths import RunPaths
from tests.jobs.queue.test_daemon import Chosen, all_ended, receipt_of, serve, state_of, tick_until
from tests.jobs.queue.test_searches import SEARCHED
from tests.jobs.queue.test_searches import receipt_of as search_receipt_of

__all__ = ["serve"]
APART = LocalEngineConfig(apart=True, machines=2)
WHERE = """
import os, torch
def net():
    print("on", os.environ.get("SHOAL_MACHINE"), flush=True)
    return torch.nn.Linear(64, 10)
"""


def apart(job):
    return job.model_copy(update={"engine": APART})


def lines_of(run_paths):
    return [line for log in run_paths.logs.glob("worker-*.log") for line in log.read_text().splitlines()]


def put_back(served, store):
    """As `shoal down` does it."""
    served.stop("down")
    tick_until(served, lambda: state_of(store, 1) == "waiting")


def test_a_job_with_another_engine_is_written_only_if_it_differs(tmp_path, job):
    paths = RunPaths(tmp_path)
    save_job(job(), paths.job)
    written = paths.job.stat()
    assert load_moved(load_run_job(paths.job), paths) == load_run_job(paths.job)
    assert paths.job.stat() == written
    moved = load_moved(apart(job(steps=7)), paths)
    assert (moved.engine, moved.steps) == (APART, job().steps), "only where it runs is changed"
    assert load_run_job(paths.job).engine == APART


@pytest.mark.long
def test_a_job_that_began_on_this_machine_goes_on_with_the_engine_of_the_next_daemon_and_back(
    store, paths, job, job_dir, serve, fork_server
):
    (job_dir / "where.py").write_text(WHERE)
    go_on = paths.runs.parent / "go-on"
    slow = {"name": "delays.py:SlowSteps", "args": {"seconds": 0.1, "until": str(go_on)}}
    made = job(model={"name": "where.py:net"}, steps=150, workers="1..2", watchers=[slow])
    alone = run(made.model_copy(update={"watchers": []}), runs=paths.runs.parent / "alone", fork_server=fork_server)
    store.submit([made], user="ann")
    for number, prepare in enumerate([lambda job: job, apart, lambda job: job]):
        served = serve(prepare=prepare)
        tick_until(served, lambda served=served: served._attempts and served._attempts[1].meter.by_workers)
        run_of = RunPaths.at(paths.runs / store.get(1).run)
        assert load_run_job(run_of.job).engine == prepare(made).engine
        assert any(line.startswith("on machine-") for line in lines_of(run_of)) == (number > 0)
        if number < 2:
            put_back(served, store)
    go_on.touch()
    tick_until(served, all_ended(store))
    assert store.get(1).state == "finished", store.get(1).reason
    assert receipt_of(paths, store.get(1)).weights_sha256 == alone.receipt.weights_sha256


@pytest.mark.long
def test_a_search_that_began_on_this_machine_goes_on_with_the_engine_of_the_next_daemon(
    store, paths, job, serve, fork_server
):
    made = job(**SEARCHED)
    alone = run_search(made, runs=paths.runs.parent / "alone", workers=1, fork_server=fork_server)
    store.submit([made], user="ann", work=SearchWork())
    policy = Chosen()
    policy.shares = {1: 2}
    first = serve(policy)
    tick_until(first, lambda: first._attempts and first._attempts[1].progressed)
    put_back(first, store)
    search = SearchPaths(RunPaths.at(paths.runs / store.get(1).run))
    begun = [file.parent for file in search.root.glob("trial-*/job.yaml") if not (file.parent / "receipt.json").exists()]
    tick_until(serve(policy, prepare=apart), all_ended(store))
    assert store.get(1).state == "finished", store.get(1).reason
    assert search_receipt_of(paths, store.get(1)).search_sha256 == alone.receipt.search_sha256
    assert begun
    assert {load_run_job(file).engine for file in (search.job, *(one / "job.yaml" for one in begun))} == {APART}
