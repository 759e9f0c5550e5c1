"""A cluster of which hosts are lost: what the daemon divides, and what becomes of jobs."""

import sys
from concurrent.futures import CancelledError

import pytest

from shoal.errors import error
from shoal.fleet.engines.host_use import GRACE_S, HostUse
from shoal.jobs.queue.attempt_end import waits_for_hosts
from shoal.jobs.queue.clusters import EngineCluster
from shoal.jobs.queue.daemon import QueueDaemon
from shoal.jobs.queue.queue_store import QueueStore
from shoal.jobs.run_executor import RunHandle, open_executor, run
from shoal.jobs.run_result import RunResult
from shoal.plan.queueing.shares import FirstComeFirstServed
from shoal.spec.engine import RayEngineConfig, SshEngineConfig
from shoal.spec.run_paths import RunPaths
from tests.fleet.ssh_server import SSHD, ssh_server
from tests.jobs.queue.test_daemon import Chosen, all_ended, receipt_of, state_of, tick_until

SSH = SshEngineConfig(kind="ssh", hosts=["a", {"host": "b", "seats": 4}])
UNREACHABLE = error("SH651", "b cannot be reached: refused")


@pytest.fixture
def now():
    return [100.0]


@pytest.fixture
def hosts(now):
    return HostUse(lambda: now[0])


def test_a_lost_host_is_no_capacity_until_it_comes_back(hosts, now):
    cluster = EngineCluster(SSH, hosts)
    assert (cluster.capacity().nodes, cluster.has_changed()) == ({"a": 1, "b": 4}, False)
    hosts.lose("b")
    hosts.lose("of another engine")
    assert (cluster.capacity().nodes, cluster.capacity().lost) == ({"a": 1, "b": 4}, ("b",))
    assert not cluster.has_changed(), "it may come back at once"
    now[0] += GRACE_S
    assert (cluster.capacity().nodes, cluster.capacity().lost) == ({"a": 1}, ("b",))
    assert [cluster.has_changed() for _ in range(2)] == [True, False]
    hosts.find("b")
    assert (cluster.capacity().nodes, cluster.capacity().lost) == ({"a": 1, "b": 4}, ())
    assert [cluster.has_changed() for _ in range(2)] == [True, False]


@pytest.mark.parametrize("engine", [SSH, RayEngineConfig(kind="ray", seats=5)])
def test_a_seat_is_for_one_worker_with_any_number_of_threads(store, job, hosts, fork_server, engine):
    """As for `shoal run`, where `seats: 4` is room for four workers."""
    store.submit([job(threads=4, workers="1..8", lanes=8)], user="ann")
    seen = {}

    class Looks(FirstComeFirstServed):
        def divide(self, now_s, running, ready, *, cluster, facts):
            seen.update(super().divide(now_s, running, ready, cluster=cluster, facts=facts))
            return {}

    lease = store.change_lease(lambda old: old.taken(holder="test", pid=1))
    with open_executor(fork_server) as executor:
        served = QueueDaemon(store, executor, lease, policy=Looks(), cluster=EngineCluster(engine, hosts))
        served.start()
        served.tick()
    assert seen[1].workers == 5
    assert store.get(1).needs.cores == 4, "what it needs elsewhere is kept"


def ended(result=None, failure=None):
    handle = RunHandle()
    handle.set_result(result) if failure is None else handle.set_failure(failure)
    return handle


def test_only_a_host_of_the_cluster_that_cannot_be_reached_is_waited_for(tmp_path):
    failed = RunResult(RunPaths(tmp_path), "failed", error=UNREACHABLE)
    told = "it waits for a host: b cannot be reached: refused"
    assert waits_for_hosts(ended(failed), ["b"]) == told
    assert waits_for_hosts(ended(failure=UNREACHABLE), ["b"]) == told
    assert waits_for_hosts(ended(failed), []) == "", "the engine of a job file, whose hosts may not exist"
    for failure in (error("SH653", "no python"), CancelledError(), KeyError("a bug")):
        assert waits_for_hosts(ended(failure=failure), ["b"]) == ""
    assert waits_for_hosts(ended(RunResult(RunPaths(tmp_path), "finished")), ["b"]) == ""


@pytest.mark.ssh
@pytest.mark.skipif(SSHD is None, reason="no sshd: tools/install_sshd.sh")
def test_a_dead_host_keeps_no_job_of_the_queue_waiting(store, paths, job, fork_server, tmp_path_factory):
    """At `closed` nothing listens. The first attempt tells it, and no attempt counts as a death."""
    made = job(steps=20, workers="1..2")
    alone = run(made, runs=paths.runs.parent / "alone", fork_server=fork_server)
    store.submit([made, made], user="ann")
    hosts, policy = HostUse(), Chosen()
    policy.shares = {1: 1, 2: 1}
    with ssh_server(tmp_path_factory.mktemp("ssh")) as server, QueueStore(paths) as own:
        names = {"hosts": ["n1", "closed"], "python": sys.executable, "config": str(server.config)}
        engine = SshEngineConfig(kind="ssh", **names)
        lease = own.change_lease(lambda old: old.taken(holder="test", pid=1))
        with open_executor(fork_server, host_use=hosts) as executor:
            served = QueueDaemon(
                own, executor, lease, policy=policy, cluster=EngineCluster(engine, hosts),
                prepare=lambda job: job.model_copy(update={"engine": engine}),
            )  # fmt: skip
            served.start()
            tick_until(served, all_ended(store))
    entries = store.entries()
    assert [(entry.state, entry.early_deaths) for entry in entries] == [("finished", 0)] * 2, entries
    assert [receipt_of(paths, one).weights_sha256 for one in entries] == [alone.receipt.weights_sha256] * 2
    assert any("it waits for a host: closed cannot be reached" in row.reason for row in store.history())
    assert state_of(store, 1) == "finished"
