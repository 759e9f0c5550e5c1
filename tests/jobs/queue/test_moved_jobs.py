"""What a daemon has begun goes on where the next daemon runs jobs."""

import shlex
from pathlib import Path

import pytest

from shoal.errors import ShoalError
from shoal.jobs.queue import background, client
from shoal.jobs.queue.clusters import Listening
from shoal.jobs.queue.daemon_lock import daemon_lock
from shoal.jobs.queue.serve import options_of
from shoal.jobs.queue.served_with import note_options, refuse_other_daemon
from shoal.jobs.resume import load_moved
from shoal.jobs.run_executor import run
from shoal.jobs.search.driver import run_search
from shoal.jobs.search.search_dir import SearchPaths
from shoal.plan.queueing.work import SearchWork
from shoal.spec.engine import LocalEngineConfig, RayEngineConfig, SshEngineConfig
from shoal.spec.load import load_run_job, save_job
from shoal.spec.remote.engine_option import parse_engine
from shoal.spec.run_paths import RunPaths
from tests.jobs.queue.test_daemon import Chosen, all_ended, receipt_of, serve, state_of, tick_until
from tests.jobs.queue.test_listening_daemon import Cluster
from tests.jobs.queue.test_network import processes, wait_for
from tests.jobs.queue.test_searches import SEARCHED
from tests.jobs.queue.test_searches import receipt_of as search_receipt_of

__all__ = ["processes", "serve"]
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
    begun = [
        file.parent for file in search.root.glob("trial-*/job.yaml") if not (file.parent / "receipt.json").exists()
    ]
    tick_until(serve(policy, prepare=apart), all_ended(store))
    assert store.get(1).state == "finished", store.get(1).reason
    assert search_receipt_of(paths, store.get(1)).search_sha256 == alone.receipt.search_sha256
    assert begun
    assert {load_run_job(file).engine for file in (search.job, *(one / "job.yaml" for one in begun))} == {APART}


@pytest.fixture
def last_daemon(paths):
    """Notes a daemon with these options, as it does when it begins to serve; it is dead now."""

    def note(engine=None, listening=None):
        paths.root.mkdir(parents=True, exist_ok=True)
        note_options(paths, options_of(engine, listening))

    return note


def start_no_daemon(paths, *words):
    raise AssertionError("a daemon was started")


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"listening": Listening("10.0.0.1:7411", Path("/etc/my certificates"))}, "--listen 10.0.0.1:7411 --tls '/etc"),
        ({"engine": RayEngineConfig(kind="ray")}, "`shoal up --engine ray`"),
        ({"engine": SshEngineConfig(kind="ssh", hosts=["a", "b"])}, '{"kind": "ssh", "hosts"'),
    ],
)
def test_a_queue_of_a_cluster_gets_no_daemon_in_the_background(store, paths, job, last_daemon, monkeypatch, how, told):
    """Its jobs would run on this machine, or fail because the machines of the queue are gone."""
    monkeypatch.setattr(background, "_spawn", start_no_daemon)
    store.submit([job()], user="ann")
    store.apply(1, lambda entry: entry.model_copy(update={"state": "held"}))
    last_daemon(**how)
    for ask in (lambda: client.submit([job()], runs=paths.runs), lambda: client.release(paths.runs, 1)):
        with pytest.raises(ShoalError, match="last served by") as caught:
            ask()
        assert (caught.value.code, told in caught.value.message) == ("SH648", True), caught.value
    assert len(store.entries()) == 1, "nothing was submitted"
    client.cancel(paths.runs, client.submit([job()], runs=paths.runs, start=False)[0].id)  # needs no daemon
    with daemon_lock(paths):
        client.submit([job()], runs=paths.runs, start=False)
        refuse_other_daemon(paths)
    last_daemon()
    with pytest.raises(AssertionError, match="was started"):
        client.submit([job()], runs=paths.runs)


@pytest.mark.parametrize("engine", [APART, SshEngineConfig(kind="ssh", hosts=["a", {"host": "b", "seats": 2}])])
def test_the_options_that_are_told_name_the_same_engine(engine):
    option, text = shlex.split(options_of(engine, None))
    assert (option, parse_engine(text)) == ("--engine", engine)


@pytest.mark.parametrize("content", [b"\xff\x00\x1b[2J", b"x" * 100_000])
def test_a_damaged_note_of_the_last_daemon_is_shown_as_far_as_it_can_be(paths, last_daemon, content):
    last_daemon()
    paths.served_with.write_bytes(content)
    with pytest.raises(ShoalError) as caught:
        refuse_other_daemon(paths)
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 1200


@pytest.mark.long
def test_a_job_of_machines_that_lost_their_daemon_is_not_given_to_this_machine(processes, tmp_path, job):
    """`up --listen` is killed. `submit` says what to start; `shoal up` then runs the job here, to the same bits."""
    cluster = Cluster(processes, tmp_path)
    made = job(
        steps=300, watchers=[{"name": "delays.py:SlowSteps", "args": {"seconds": 0.1, "until": str(tmp_path / "go")}}]
    )
    served = cluster.serve()
    cluster.offer("first")
    cluster.submit("job.yaml", job=made)
    wait_for(cluster.entries, lambda entries: entries[1].proven)
    served.kill()
    served.wait()
    processes.started.remove(served)
    with pytest.raises(ShoalError, match=f"--listen {cluster.address}"):
        client.submit([made], runs=cluster.paths.runs)
    (tmp_path / "go").touch()
    processes.start("plain", "up", "--runs", cluster.paths.runs)
    cluster.wait_until_all_have_ended()
    assert cluster.entries()[1].state == "finished", cluster.entries()[1].reason
    assert load_run_job(cluster.run_of(1).job).engine == made.engine
