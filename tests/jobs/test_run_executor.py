"""Several runs in one process: each goes on, fails or is stopped without touching another."""

import copy
import os
import signal
from concurrent.futures import CancelledError

import pytest

from shoal.errors import ShoalError
from shoal.jobs import fork_servers, planner
from shoal.jobs.fork_servers import ForkServerPool
from shoal.jobs.run_executor import open_executor, run_to_end
from shoal.jobs.run_index import list_summaries
from shoal.spec.load import make_job
from tests.conftest import MLP
from tests.jobs.fault_injection import assert_nothing_left, processes_of, time_limit
from tests.jobs.job_profile import JOB_PROFILE

ENDLESS = {"steps": 10**6, "evaluate": {"every_steps": 10**6}}
WRONG_SHAPE = {"model": {"name": "models.py:mlp", "args": {"inputs": 63, "classes": 10}}}
FOLDS = {"data": MLP["data"] | {"split": {"kind": "stratified", "folds": 3, "parallel": 2}}, "steps": 12}


@pytest.fixture(autouse=True)
def limited_time():
    with time_limit(120):
        yield


@pytest.fixture
def runs(fork_server):
    with open_executor(fork_server) as made:
        yield made


@pytest.fixture
def submit(runs, job_dir):
    def go(look=None, **changes):
        job = make_job(copy.deepcopy(MLP) | changes, base_dir=str(job_dir))
        return runs.submit(job, runs=job_dir / "many", on_event=look)

    return go


class Steps:
    """A watcher that knows the newest step; at `stop_at` it gives a reason to stop."""

    def __init__(self, stop_at=10**9, reason="pruned"):
        self.step, self.stop_at, self.reason = 0, stop_at, reason

    def __call__(self, paths, event, state):
        self.step = state.step
        return self.reason if state.step >= self.stop_at else None


def tick_until(runs, predicate):
    while not predicate():
        runs.tick()


def without_certificates(job):
    """As if the directory had gone since the job was checked."""
    return job.model_copy(update={"network": job.network.model_copy(update={"tls": "gone"})})


def test_healthy_runs_go_on_beside_every_kind_of_trouble(runs, submit, run, job_dir, monkeypatch):
    def slow_measurement(job, fork_servers):
        while not (failed.done and pruned.done and healthy.done):
            yield ()
        return JOB_PROFILE

    monkeypatch.setattr(planner, "measure_steps", slow_measurement)
    progress = Steps()
    planned = submit(name="planned", sync="auto", workers=2)
    healthy = submit(progress, workers=2)
    failed = submit(name="failed", **WRONG_SHAPE)
    pruned = submit(Steps(stop_at=5), name="pruned", **ENDLESS)
    untrusted = runs.submit(
        without_certificates(make_job(MLP | {"name": "untrusted"}, base_dir=str(job_dir))), runs=job_dir / "many"
    )
    tick_until(runs, lambda: progress.step > 0)
    late = submit(name="late", seed=7)
    runs.run_until_done()

    assert failed.result().status == "failed"
    assert failed.result().error.code.startswith("SH")
    assert (pruned.result().status, pruned.stop_reason) == ("pruned", "pruned")
    assert pruned.result().saved_step >= 5
    with pytest.raises(ShoalError, match=r"SH619 .*cert\.pem"):
        untrusted.result()
    alone = run(MLP).receipt
    assert healthy.result().receipt.weights_sha256 == alone.weights_sha256
    assert healthy.result().receipt.state_sha256 == alone.state_sha256
    assert planned.result().receipt.weights_sha256 == alone.weights_sha256
    assert late.result().receipt.weights_sha256 == run(MLP, seed=7).receipt.weights_sha256
    for one in (failed, pruned, healthy, planned, late):
        assert_nothing_left(one.result())


def test_a_pruned_run_is_saved_at_a_step_boundary_and_can_be_resumed(runs, submit, run, resume):
    pruned = submit(Steps(stop_at=10), workers=2)
    runs.run_until_done()
    result = pruned.result()
    assert result.status == "pruned"
    assert 10 <= result.saved_step < MLP["steps"]
    assert (result.receipt, result.error) == (None, None)
    again = resume(result.paths)
    assert again.receipt.weights_sha256 == run(MLP).receipt.weights_sha256
    assert again.receipt.redone == 0


def test_one_run_is_stopped_and_the_others_go_on(runs, submit):
    progress = Steps()
    stopped, other = submit(progress, name="stopped", **ENDLESS), submit(name="other")
    tick_until(runs, lambda: progress.step >= 3)
    runs.stop(stopped, "preempted")
    runs.stop(stopped, "once more")
    runs.run_until_done(other)
    assert other.result().status == "finished"
    runs.run_until_done(stopped)
    assert stopped.result().status == "preempted"
    assert runs.active == []


def test_a_watcher_that_fails_ends_its_own_run_alone(runs, submit, job_dir):
    def fail(paths, event, state):
        if state.step >= 3:
            raise ZeroDivisionError("the watcher's own bug")

    broken, other = submit(fail, name="broken", **ENDLESS), submit(name="other")
    runs.run_until_done()
    with pytest.raises(ZeroDivisionError):
        broken.result()
    assert other.result().status == "finished"
    assert not processes_of(broken.paths.root)


def test_a_run_that_is_stopped_while_it_is_planned_leaves_nothing(runs, submit, job_dir, monkeypatch):
    closed = []

    def endless_measurement(job, fork_servers):
        try:
            while True:
                yield ()
        finally:
            closed.append(True)

    monkeypatch.setattr(planner, "measure_steps", endless_measurement)
    planned = submit(sync="auto")
    for _ in range(3):
        runs.tick(0)
    assert not planned.done
    runs.stop(planned, "pruned")
    runs.tick(0)
    with pytest.raises(CancelledError, match="pruned"):
        planned.result()
    assert closed == [True]
    assert planned.paths is None
    assert not list_summaries(job_dir / "many")


@pytest.mark.parametrize(("number", "ends"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_while_a_run_is_planned_ends_the_caller(runs, submit, monkeypatch, number, ends):
    def interrupted_measurement(job, fork_servers):
        os.kill(os.getpid(), number)
        while True:
            yield ()

    monkeypatch.setattr(planner, "measure_steps", interrupted_measurement)
    with pytest.raises(ends):
        run_to_end(runs, submit(sync="auto"))


def test_a_signal_stops_every_run(runs, submit):
    def interrupt(paths, event, state):
        if state.step >= 3 and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGINT))

    sent = []
    both = [submit(interrupt, name="first", **ENDLESS), submit(name="second", **ENDLESS)]
    runs.run_until_done()
    assert [one.result().status for one in both] == ["interrupted", "interrupted"]


def test_folds_are_runs_beside_others(runs, submit, run):
    folds, other = submit(name="folds", **FOLDS), submit(name="other")
    most = 0
    while runs.active:
        runs.tick()
        most = max(most, len(runs.active))
    assert most >= 4, "the job, two of its folds, and the other"
    assert other.result().receipt.weights_sha256 == run(MLP).receipt.weights_sha256
    alone = run(MLP, **FOLDS)
    found = folds.result()
    assert [one.receipt.weights_sha256 for one in found.children] == [
        one.receipt.weights_sha256 for one in alone.children
    ]


def test_a_watcher_that_prunes_a_fold_prunes_the_job(runs, submit):
    def prune(paths, event, state):
        return "pruned" if paths.name == "fold-0" and state.step >= 3 else None

    folds = submit(prune, **FOLDS | {"steps": 10**6, "evaluate": {"every_steps": 10**6}})
    runs.run_until_done()
    assert [one.status for one in folds.result().children] == ["pruned"] * 3


def test_what_is_broken_off_leaves_no_process(fork_server, job_dir):
    progress = Steps()
    job = make_job(MLP | ENDLESS, base_dir=str(job_dir))
    folds = make_job(MLP | FOLDS | ENDLESS | {"name": "folds"}, base_dir=str(job_dir))
    with open_executor(fork_server) as runs:
        handles = [runs.submit(one, runs=job_dir / "many", on_event=progress) for one in (job, folds)]
        tick_until(runs, lambda: progress.step >= 3)
        active = runs.active
    assert len(active) == 4
    for handle in handles:
        with pytest.raises(CancelledError):
            handle.result()
    for handle in active:
        assert not processes_of(handle.paths.root)


def test_a_directory_is_driven_once(runs, submit, job_dir):
    progress = Steps()
    first = submit(progress, **ENDLESS)
    tick_until(runs, lambda: progress.step >= 1)
    second = runs.submit_resume(first.paths)
    runs.tick(0)
    with pytest.raises(ShoalError, match="SH602"):
        second.result()
    assert not first.done


# ---- where processes come from ----


class FakeForkServer:
    def __init__(self, threads, *, modules=(), python="", at_once=True):
        self.key = threads, tuple(modules), python
        self.closed = False

    def preload(self, modules):
        self.key = self.key[0], (*self.key[1], *modules), self.key[2]

    def close(self):
        self.closed = True


def test_fork_servers_are_shared_by_interpreter_threads_and_modules(monkeypatch):
    monkeypatch.setattr(fork_servers, "make_fork_server", FakeForkServer)
    with ForkServerPool() as pool:
        one = pool.get(1, modules=["a", "b"])
        assert pool.get(1, modules=["b", "a"]) is one
        others = [
            pool.get(2, modules=["a", "b"]),
            pool.get(1, modules=["a"]),
            pool.get(1, modules=["a", "b"], python="p"),
        ]
        assert len({one, *others}) == 4
    assert all(server.closed for server in (one, *others))


def test_a_job_with_other_threads_gets_another_fork_server(monkeypatch, job_dir):
    monkeypatch.setattr(fork_servers, "make_fork_server", FakeForkServer)
    one, two = (make_job(MLP | {"threads": threads}, base_dir=str(job_dir)) for threads in (1, 2))
    with ForkServerPool() as pool:
        assert (pool.for_job(one).key[0], pool.for_job(two).key[0]) == (1, 2)
        assert "shoal.tasks.first_metric" in pool.for_job(one).key[1]


@pytest.mark.parametrize(("changes", "taken"), [({}, True), ({"threads": 2}, False), ({"engine": "slurm"}, False)])
def test_a_fork_server_that_was_started_early_is_taken_or_closed(monkeypatch, job_dir, changes, taken):
    monkeypatch.setattr(fork_servers, "make_fork_server", FakeForkServer)
    job = make_job(MLP | changes, base_dir=str(job_dir))
    with ForkServerPool() as pool:
        pool.start_early()
        early = pool._early
        found = pool.for_job(job)
        assert (found is early, early.closed) == (taken, not taken)
        assert "shoal.tasks.first_metric" in found.key[1]
    assert found.closed


def test_a_job_that_cannot_be_read_leaves_no_fork_server(monkeypatch):
    monkeypatch.setattr(fork_servers, "make_fork_server", FakeForkServer)
    with ForkServerPool() as pool:
        pool.start_early()
        early = pool._early
    assert early.closed


def test_a_fork_server_that_was_brought_serves_all_and_stays_open():
    mine = FakeForkServer(1)
    with ForkServerPool(mine) as pool:
        assert pool.get(8, modules=["a"]) is mine
    assert not mine.closed
