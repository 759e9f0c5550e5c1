"""The daemon with real jobs, driven tick by tick in this process."""

import contextlib
import time
from functools import partial
from pathlib import Path

import pytest

from shoal.errors import ShoalError
from shoal.events.stream import read_events
from shoal.fleet.process_limits import find_cgroup_parent
from shoal.jobs import run_dir, run_executor
from shoal.jobs.queue import client, daemon
from shoal.jobs.queue.daemon import QueueDaemon
from shoal.jobs.queue.queue_store import QueueStore
from shoal.jobs.run_executor import open_executor
from shoal.plan.queueing import order, transitions
from shoal.plan.queueing.elastic_shares import ElasticShares
from shoal.plan.queueing.shares import CoreCapacity, FirstComeFirstServed, Share
from shoal.spec.receipt import read_receipt_file
from shoal.spec.run_paths import RunPaths
from tests.jobs.fault_injection import time_limit

ENDLESS = {"name": "endless", "steps": 10**6}
WRONG_SHAPE = {"name": "wrong", "model": {"name": "models.py:mlp", "args": {"inputs": 63, "classes": 10}}}


@pytest.fixture(autouse=True)
def limited_time():
    with time_limit(150):
        yield


class Restless:
    """Gives every job another number of workers at each decision."""

    def __init__(self):
        self.turn = 0

    def divide(self, now_s, running, ready, *, cluster, facts):
        self.turn += 1
        return {entry.id: Share(1 + (self.turn + entry.id) % 3, f"turn {self.turn}") for entry in [*running, *ready]}


class Chosen:
    """Gives what the test says."""

    def __init__(self, **shares):
        self.shares = shares
        self.facts = {}

    def divide(self, now_s, running, ready, *, cluster, facts):
        self.facts = facts
        return {number: Share(workers) for number, workers in self.shares.items()}


class FixedCluster:
    """A machine with so many cores; `nodes` may be changed."""

    def __init__(self, cores):
        self.nodes = {"here": cores}
        self.memory_bytes = {}
        self.changed = False
        self.placed = {}

    def capacity(self):
        return CoreCapacity(dict(self.nodes), memory_bytes=self.memory_bytes)

    def has_changed(self):
        changed, self.changed = self.changed, False
        return changed

    def place(self, wanted):
        self.placed = dict(wanted)


@pytest.fixture
def serve(paths, fork_server):
    """Makes daemons, one after the other, each with a store of its own."""
    with contextlib.ExitStack() as stack:

        def make(policy=None, cores=2, **named):
            store = stack.enter_context(QueueStore(paths))
            executor = stack.enter_context(open_executor(fork_server))
            lease = store.change_lease(lambda old: old.taken(holder="test", pid=1))
            made = QueueDaemon(
                store,
                executor,
                lease,
                policy=policy or ElasticShares(),
                cluster=FixedCluster(cores),
                **named,
            )
            made.start()
            made.executor = executor
            return made

        yield make


def tick_until(served, predicate):
    while not predicate():
        served.tick()


def receipt_of(paths, entry):
    return read_receipt_file(RunPaths.at(paths.runs / entry.run).receipt).own


def all_ended(store):
    return lambda: all(entry.has_ended or entry.state == "held" for entry in store.entries())


def state_of(store, number):
    return store.get(number).state


def test_jobs_that_are_resized_again_and_again_have_the_bits_of_undisturbed_runs(
    store, paths, job, serve, fork_server, monkeypatch
):
    monkeypatch.setattr(daemon, "DECIDE_S", 0.7)
    jobs = [job(name="a", workers="1..3", steps=60), job(name="b", workers="1..3", steps=40, seed=1)]
    undisturbed = [run_executor.run(one, runs=paths.runs.parent / "alone", fork_server=fork_server) for one in jobs]
    store.submit(jobs, user="ann")
    tick_until(serve(Restless(), cores=6), all_ended(store))
    for entry, alone in zip(store.entries(), undisturbed, strict=True):
        assert entry.state == "finished", entry.reason
        assert receipt_of(paths, entry).weights_sha256 == alone.receipt.weights_sha256
        sizes = [row.workers for row in store.history(entry.id) if row.workers]
        assert len(set(sizes)) > 1, "it was never resized"


def test_a_failed_job_says_why_and_the_rest_goes_on(store, job, serve):
    store.submit([job(**WRONG_SHAPE), job(steps=5)], user="ann")
    store.submit([job(steps=5)], user="ann", after=[1])
    tick_until(serve(), all_ended(store))
    assert [entry.state for entry in store.entries()] == ["failed", "finished", "held"]
    assert store.get(1).reason.startswith("SH715")
    assert "job 1" in store.get(3).reason


def test_a_running_job_is_cancelled_at_a_step_and_can_be_resumed_by_hand(store, paths, job, serve):
    store.submit([job(**ENDLESS)], user="ann")
    served = serve()
    tick_until(served, lambda: store.get(1).workers and served._attempts[1].meter.by_workers)
    store.apply(1, transitions.request_cancel)
    tick_until(served, all_ended(store))
    assert (store.get(1).state, store.get(1).reason) == ("cancelled", "it was cancelled")
    state = run_executor.load_run_state(RunPaths.at(paths.runs / store.get(1).run))
    assert (state.status, state.saved_step is not None) == ("cancelled", True)


@pytest.mark.parametrize("make_policy", [ElasticShares, FirstComeFirstServed])
def test_a_user_at_the_quota_leaves_the_other_cores_to_the_next_user(store, job, serve, make_policy):
    """Ann's jobs all come before bob's, but only one of them may run at a time."""
    store.submit([job(**ENDLESS)] * 30, user="ann", priority=5)
    (bob,) = store.submit([job(name="bob", steps=5)], user="bob")
    store.set_quota("ann", 1)
    served = serve(make_policy())
    tick_until(served, lambda: store.get(bob.id).has_ended)
    assert store.get(bob.id).state == "finished"
    assert sum(entry.attempts for entry in store.entries() if entry.user == "ann") == 1
    served.stop("down")
    tick_until(served, served.tick)


@pytest.mark.parametrize("make_policy", [ElasticShares, FirstComeFirstServed])
def test_overtaking_starts_are_counted_and_who_was_overtaken_often_goes_first(store, job, serve, make_policy):
    (bob,) = store.submit([job(steps=2)], user="bob")
    store.submit([job(steps=2)] * 2, user="ann", priority=5)
    store.apply(bob.id, partial(transitions.overtake, times=order.MAX_OVERTAKEN - 1))
    tick_until(serve(make_policy(), cores=1), all_ended(store))
    starts = [row.id for row in store.history() if row.state == "running"]
    assert list(dict.fromkeys(starts)) == [2, bob.id, 3], "the first may have to make room for bob"
    assert store.get(bob.id).overtaken == order.MAX_OVERTAKEN


def test_jobs_with_more_memory_than_any_machine_keep_nobody_waiting_and_say_so(store, job, serve):
    store.submit([job(name="large", limits={"memory": "1100 GB"})] * 13, user="ann", priority=5)
    (bob,) = store.submit([job(name="bob", steps=5)], user="bob")
    served = serve()
    served._cluster.memory_bytes = {"here": 8 * 10**9}
    tick_until(served, lambda: store.get(bob.id).has_ended)
    assert store.get(bob.id).state == "finished"
    assert {entry.reason for entry in store.entries() if entry.id != bob.id} == {
        "It waits: no machine has the 1 core and 1100.0 GB of memory that a worker needs."
    }


def test_a_dead_daemons_run_is_resumed_and_not_started_again(store, paths, job, serve, fork_server):
    made = job(steps=150, workers="1..2")
    alone = run_executor.run(made, runs=paths.runs.parent / "alone", fork_server=fork_server)
    store.submit([made], user="ann")
    first = serve()
    tick_until(first, lambda: store.get(1).run and first._attempts and first._attempts[1].meter.by_workers)
    first.executor.close()
    second = serve()  # a higher epoch
    assert store.get(1).state == "waiting"
    first._next_beat_s = 0.0
    with pytest.raises(transitions.StaleEpochError):
        first.tick()
    tick_until(second, all_ended(store))
    entry = store.get(1)
    assert (entry.state, entry.attempts) == ("finished", 2), entry.reason
    assert receipt_of(paths, entry).weights_sha256 == alone.receipt.weights_sha256
    assert receipt_of(paths, entry).starts == 2
    assert [one.name for one in run_dir.list_runs(paths.runs)] == [entry.run]


def test_a_run_that_finished_while_nobody_looked_is_not_run_again(store, paths, job, serve, fork_server):
    """The daemon died after the receipt was written and before the queue knew."""
    made = job(steps=5)
    store.submit([made], user="ann")
    reserved = run_dir.reserve("mlp", paths.runs)
    store.change_lease(lambda old: old.taken(holder="dead", pid=1))
    store.apply(1, lambda e: transitions.claim(e, epoch=1, run=reserved.name), epoch=1)
    with open_executor(fork_server) as executor:
        handle = executor.submit(made, runs=paths.runs, reserved=reserved)
        executor.run_until_done(handle)
    written = reserved.receipt.read_bytes()
    tick_until(serve(), all_ended(store))
    assert state_of(store, 1) == "finished"
    assert reserved.receipt.read_bytes() == written
    assert read_receipt_file(reserved.receipt).own.starts == 1


def test_a_daemon_that_died_before_the_run_began_leaves_its_directory_to_the_next(store, paths, job, serve):
    store.submit([job(steps=5)], user="ann")
    reserved = run_dir.reserve("mlp", paths.runs)
    store.change_lease(lambda old: old.taken(holder="dead", pid=1))
    store.apply(1, lambda e: transitions.claim(e, epoch=1, run=reserved.name), epoch=1)
    tick_until(serve(), all_ended(store))
    assert (store.get(1).state, store.get(1).run) == ("finished", reserved.name)
    assert len(list(paths.runs.glob("mlp-*"))) == 1


def test_a_job_whose_workers_die_again_and_again_is_held_and_the_rest_goes_on(store, job, serve):
    bad = job(name="bad", elastic={"restarts": 0}, watchers=[{"name": "faults.py:KillAtEveryStep"}])
    store.submit([bad, job(steps=5)], user="ann")
    tick_until(serve(), all_ended(store))
    assert [entry.state for entry in store.entries()] == ["held", "finished"]
    assert store.get(1).attempts <= transitions.MAX_EARLY_DEATHS + 1, "the first may have made a new step"
    assert "3 attempts in a row" in store.get(1).reason
    assert "SH6" in store.get(1).reason


def test_a_job_that_lives_long_but_never_makes_a_step_is_held_and_the_rest_goes_on(store, job, serve):
    """On a clock on which every attempt outlives its first seconds."""
    bad = job(name="bad", elastic={"restarts": 0}, watchers=[{"name": "faults.py:KillAtEveryStep"}])
    store.submit([bad, job(steps=5)], user="ann")
    fruitless = transitions.MAX_FRUITLESS - 2
    store.apply(1, lambda entry: entry.model_copy(update={"fruitless": fruitless}))
    tick_until(serve(clock=lambda: 300 * time.monotonic()), all_ended(store))
    assert [entry.state for entry in store.entries()] == ["held", "finished"]
    assert "10 attempts in a row made no new step" in store.get(1).reason
    said = [row.reason for row in store.history(1) if row.state == "waiting" and row.reason]
    assert said[-1].startswith("9 attempts in a row made no new step, so it will be resumed after 300 s: SH6")
    assert store.apply(1, transitions.release).fruitless == 0


@pytest.mark.long
def test_a_worker_above_its_memory_ends_only_its_own_job_and_what_the_limits_mean_is_told(store, paths, job, serve):
    """Without cgroups its allocation fails, and so does the job; with them the kernel kills it, and the job is held."""
    large = {"name": "models.py:mlp", "args": {"inputs": 64, "classes": 10, "hidden": 20_000, "depth": 1}}
    store.submit([job(name="large", model=large, limits={"memory": "900 MB"})], user="ann")
    store.submit([job(name="rest", steps=5, limits={"memory": "3 GB", "cpus": 1})], user="ann")
    tick_until(serve(), all_ended(store))
    grown, rest = store.entries()
    own = Path("/proc/self/cgroup").read_text()
    by_kernel = find_cgroup_parent(Path("/sys/fs/cgroup"), own, need={"memory"}).directory is not None
    assert (grown.state, grown.reason[:5]) == (("held", "SH603") if by_kernel else ("failed", "SH407")), grown.reason
    assert rest.state == "finished", rest.reason
    notes = [
        event["message"] for event in read_events(RunPaths.at(paths.runs / rest.run).events) if event.kind == "note"
    ]
    assert by_kernel or any("limits.memory bounds what the worker reserves" in note for note in notes), notes


def test_a_job_that_gets_no_workers_any_more_is_saved_and_goes_on_later(store, paths, job, serve, fork_server):
    made, go_on = job(steps=150), paths.runs.parent / "go-on"
    alone = run_executor.run(made, runs=paths.runs.parent / "alone", fork_server=fork_server)
    slow = {"name": "delays.py:SlowSteps", "args": {"seconds": 0.1, "until": str(go_on)}}
    store.submit([job(steps=150, watchers=[slow])], user="ann")
    policy = Chosen()
    policy.shares = {1: 1}
    served = serve(policy)
    tick_until(served, lambda: served._attempts and served._attempts[1].meter.by_workers)
    policy.shares = {}
    served._next_decision_s = 0.0
    tick_until(served, lambda: state_of(store, 1) == "waiting")
    assert "others" in store.get(1).reason
    go_on.touch()
    policy.shares = {1: 2}
    served._next_decision_s = 0.0
    tick_until(served, all_ended(store))
    assert receipt_of(paths, store.get(1)).weights_sha256 == alone.receipt.weights_sha256
    assert store.get(1).early_deaths == 0


def test_a_stopped_daemon_saves_its_runs_and_puts_them_back(store, paths, job, serve):
    store.submit([job(**ENDLESS)], user="ann")
    served = serve()
    tick_until(served, lambda: served._attempts and served._attempts[1].meter.by_workers)
    store.change_lease(lambda old: old.model_copy(update={"stop_requested": True}))
    served._next_beat_s = 0.0
    tick_until(served, served.tick)
    entry = store.get(1)
    assert (entry.state, entry.reason) == ("waiting", "the daemon was ended by `shoal down`")
    assert not store.lease().holder


def test_a_daemon_with_nothing_to_do_ends_and_its_clock_is_not_that_of_the_wall(store, job, serve, monkeypatch):
    """The clock of the wall jumps by years in both directions while it waits."""
    now = [1000.0]
    jumps = iter([-(10**9), 10**9] * 10**4)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + next(jumps))
    served = serve(FirstComeFirstServed(), idle_s=60.0, clock=lambda: now[0])
    store.submit([job(steps=3)], user="ann")
    tick_until(served, all_ended(store))
    assert state_of(store, 1) == "finished"
    assert not served.tick()
    now[0] += 59.0
    assert not served.tick()
    now[0] += 2.0
    assert served.tick()
    assert not store.lease().holder


def test_a_job_submitted_while_the_daemon_ends_is_not_forgotten(store, job, serve):
    now = [1000.0]
    served = serve(idle_s=60.0, clock=lambda: now[0])
    assert not served.tick()
    now[0] += 61.0
    store.submit([job(steps=3)], user="ann")  # the daemon has not looked since
    assert not served._store.release_lease_if_idle(served._epoch, is_idle=served._has_nothing_to_do)
    tick_until(served, all_ended(store))
    assert state_of(store, 1) == "finished"


def test_speeds_are_measured_and_kept_for_equal_jobs(store, job, serve):
    store.submit([job(steps=200, workers="1..2")], user="ann")
    tick_until(serve(), all_ended(store))
    assert sum(one.steps for one in store.speeds(store.get(1).needs.speed_key).values()) > 100


def test_a_job_that_waits_has_its_declared_steps_and_the_speed_of_a_running_job_like_it(store, job, serve):
    alike, other = job(name="other", seed=7, steps=40), job(steps=40, batch_size=job().batch_size * 2)
    store.submit([job(**ENDLESS), alike, other], user="ann")
    policy = Chosen()
    policy.shares = {1: 1, 2: 0, 3: 0}
    served = serve(policy)
    tick_until(served, lambda: policy.facts and policy.facts[1].speeds)
    assert policy.facts[2].speeds.keys() == {1}
    assert not policy.facts[3].speeds, "its batch is another one"
    assert [policy.facts[n].remaining for n in (2, 3)] == [40.0, 40.0]
    assert policy.facts[1].remaining < 10**6
    store.apply(1, transitions.request_cancel)
    tick_until(served, lambda: state_of(store, 1) == "cancelled")


def test_a_job_that_was_planned_has_those_speeds_until_its_own_are_known(store, job, serve):
    """Where a run has measured one number of workers, the plan's other numbers are scaled to it."""
    planned = job(steps=10**6, workers="1..4")
    store.submit([planned], user="ann")
    client.keep_planned_speeds(store.paths.runs, job(name="other", steps=5), {1: 10.0, 2: 18.0, 4: 30.0})
    policy = Chosen()
    policy.shares = {1: 1}
    served = serve(policy)
    served.tick()
    assert policy.facts[1].speeds == {1: 10.0, 2: 18.0, 4: 30.0}
    client.keep_planned_speeds(store.paths.runs, planned, {1: 10.0, 2: 20.0})  # planned anew while it runs
    tick_until(served, lambda: policy.facts[1].speeds[1] != 10.0)
    own = policy.facts[1].speeds
    assert own[2] == pytest.approx(2 * own[1])
    assert 4 not in own, "the newer plan replaces the older one"
    store.apply(1, transitions.request_cancel)
    tick_until(served, lambda: state_of(store, 1) == "cancelled")


def test_folds_share_the_workers_of_their_job(store, paths, job, serve):
    folds = {"kind": "stratified", "folds": 3, "parallel": 2}
    made = job(steps=10, workers="1..2")
    made = made.model_copy(update={"data": job(data=made.data.model_dump(mode="json") | {"split": folds}).data})
    store.submit([made], user="ann")
    assert store.get(1).needs.copies == 2
    tick_until(serve(cores=2), all_ended(store))
    assert state_of(store, 1) == "finished", store.get(1).reason
    assert len(RunPaths.at(paths.runs / store.get(1).run).folds) == 3


def test_looking_at_a_queue_that_does_not_exist_makes_none(tmp_path):
    assert client.look(tmp_path / "runs").entries == {}
    assert not (tmp_path / "runs").exists()


def test_a_job_that_is_cancelled_in_the_moment_of_its_start_is_not_started(store, paths, job, serve):
    store.submit([job(steps=5), job(steps=5)], user="ann")
    served = serve()
    entry = store.get(1)
    store.apply(1, transitions.request_cancel)  # the daemon has not read it yet
    served._start(entry, Share(1))
    assert not served._attempts
    assert list(paths.runs.glob("mlp-*")) == []
    tick_until(served, all_ended(store))
    assert [one.state for one in store.entries()] == ["cancelled", "finished"]


def test_a_daemon_whose_queue_file_goes_away_ends_with_an_error(store, paths, job, serve):
    served = serve()
    served.tick()
    paths.file.unlink()
    served._next_beat_s = 0.0
    with pytest.raises(ShoalError) as caught:
        served.tick()
    assert caught.value.code == "SH642"
