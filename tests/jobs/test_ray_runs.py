"""Whole runs over several real nodes of Ray: the same bits as one undisturbed worker. Run by `make test-ray`."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from shoal.events import read_events
from shoal.spec.run_paths import RunPaths
from tests.conftest import MLP
from tests.fleet.engine_contract import kill_above
from tests.fleet.ray_nodes import ENVIRONMENT, ray_nodes
from tests.jobs.background_run import background_run
from tests.jobs.fault_injection import assert_same, assert_token_is_hidden, reference_receipt
from tests.jobs.search.other_engine import assert_same_search

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no ray: make test-ray"),
]
SMALL = MLP | {"steps": 400, "evaluate": {"every_steps": 100}, "checkpoint": {"every": "50 steps"}}

LONGER = SMALL | {"steps": 3000}  # ten minutes while steps are slow


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with ray_nodes(2, tmp_path_factory.mktemp("ray") / "log") as made:
        yield made


@pytest.fixture
def cluster(nodes, monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    yield nodes
    wait_for(lambda: not nodes.groups(), "placement groups are left")


@pytest.fixture
def engine(cluster):
    return {"kind": "ray", "address": cluster.address}


def wait_for(condition, what):
    until = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.1)


def slow(job_dir):
    """Steps are slow until the file `ready` is there."""
    return [{"name": "delays.py:SlowSteps", "args": {"seconds": 0.2, "until": str(job_dir / "ready")}}]


@pytest.mark.parametrize("killed", ["worker", "agent", "actor"])
def test_the_same_bits_through_a_kill(run, job_dir, cluster, engine, killed):
    """Nobody who asks Ray, lists processes or reads Ray's logs learns the token meanwhile."""
    with background_run(run, LONGER, workers=2, engine=engine, watchers=slow(job_dir)) as it:
        it.wait_for_workers(2)
        told = cluster.ask(do="tables")["tables"]
        logs = [file.read_text(errors="replace") for file in cluster.logs().rglob("*") if file.is_file()]
        assert "AgentActor" in told
        assert any("AgentActor" in log for log in logs)
        assert_token_is_hidden(it.paths, told, *logs)
        pids = {worker.pid for worker in it.state.training_workers}
        deaths = len(pids & kill_above(it.state.training_workers[-1].pid, killed))
        it.wait_until(lambda state: sum(w.state == "dead" for w in state.workers.values()) == deaths)
        it.wait_for_workers(2)
        (job_dir / "ready").touch()
    outcome = it.outcome.result()
    assert_same(outcome, reference_receipt(run, LONGER))
    assert outcome.receipt.deaths_survived == deaths


def test_a_search_on_ray_decides_and_finds_the_same(job_dir, fork_server, engine):
    assert_same_search(engine, job_dir, fork_server)


def test_a_drained_node_is_a_planned_leave_and_a_dead_one_is_survived(run, job_dir, cluster, engine):
    """Each worker fills a node."""
    whole = engine | {"resources": {"CPU": 2}}
    with background_run(run, LONGER, workers=2, engine=whole, watchers=slow(job_dir)) as it:
        it.wait_for_workers(2)
        drained, dead = (nodes[0] for nodes in cluster.groups().values())
        assert cluster.ask(do="drain", node=drained)["done"]
        it.wait_until(lambda state: any(w.state == "left" for w in state.workers.values()))
        cluster.ask(do="add")
        it.wait_for_workers(2)
        os.kill(cluster.ask(do="nodes")["nodes"][dead], signal.SIGKILL)
        it.wait_until(lambda state: any(w.state == "dead" for w in state.workers.values()))
        (job_dir / "ready").touch()
    outcome = it.outcome.result()
    assert_same(outcome, reference_receipt(run, LONGER))
    assert outcome.receipt.deaths_survived == 1


def test_a_sharded_replica_starts_whole_or_not_at_all(run, job_dir, tmp_path, monkeypatch):
    """At first the cluster has room for one of the two workers, which nobody gets. Later a lost place comes back in the
    same group, and a drained one is replaced by itself."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    sharded = LONGER | {"shard": "fsdp", "workers": 2}
    with ray_nodes(1, tmp_path / "log") as cluster:
        whole = {"kind": "ray", "address": cluster.address, "resources": {"CPU": 2}}
        with background_run(run, sharded, engine=whole, watchers=slow(job_dir)) as it:
            wait_for(lambda: len(cluster.states_of_agents()) == 2, "nothing was asked for")
            ((group, (state, nodes)),) = cluster.states_of_groups().items()
            assert (state, len(nodes)) == ("PENDING", 2)
            assert cluster.states_of_agents() == ["PENDING_CREATION"] * 2
            cluster.ask(do="add")
            it.wait_for_workers(2)

            kept, doomed = cluster.groups()[group]
            os.kill(cluster.ask(do="nodes")["nodes"][doomed], signal.SIGKILL)
            it.wait_until(lambda state: any(w.state == "dead" for w in state.workers.values()))
            wait_for(lambda: cluster.states_of_groups()[group][0] == "RESCHEDULING", "Ray does not miss the place")
            cluster.ask(do="add")
            it.wait_for_workers(2)
            ((first, drained),) = cluster.groups().values()
            assert first == kept != drained

            assert cluster.ask(do="drain", node=drained)["done"]
            wait_for(lambda: len(cluster.groups()) == 2, "no other place is asked for")
            cluster.ask(do="add")
            it.wait_until(lambda state: any(w.state == "left" for w in state.workers.values()))
            it.wait_for_workers(2)
            alone = next(nodes for name, nodes in cluster.groups().items() if name != group)
            assert len(alone) == 1
            assert alone[0] not in (kept, drained)
            (job_dir / "ready").touch()
        outcome = it.outcome.result()
        wait_for(lambda: not cluster.groups(), "placement groups are left")
    assert outcome.status == "finished", outcome.error
    assert outcome.receipt.deaths_survived == 1
    assert outcome.receipt.weights_sha256 == run(sharded, runs="calm").receipt.weights_sha256


COMMAND = [sys.executable, "-c", "from shoal.cli import main; main()"]


def test_workers_outlive_a_killed_driver_and_the_next_one_takes_them_over(run, job_dir, cluster, engine):
    """They train on, though no save reaches the run. Nothing starts again, and nothing is computed twice."""
    job = LONGER | {"workers": 2, "engine": engine, "watchers": slow(job_dir), "checkpoint": {"every": "2 steps"}}
    (job_dir / "job.yaml").write_text(yaml.safe_dump(job | {"elastic": {"patience_s": 300}}))
    paths = RunPaths(job_dir / "runs" / "mlp-1")
    with subprocess.Popen([*COMMAND, "run", "job.yaml", "-q"], cwd=job_dir) as driver:
        wait_for(lambda: carrying(paths) == 2 and saved_step(paths) >= 4, "two workers do not train")
        driver.send_signal(signal.SIGKILL)
    first = started(paths)
    with subprocess.Popen([*COMMAND, "resume", "mlp-1", "-q"], cwd=job_dir) as driver:
        before = saved_step(paths)
        wait_for(lambda: saved_step(paths) > before, "the next driver does not get what they save")
        (job_dir / "ready").touch()
        assert driver.wait() == 0
    events = list(read_events(paths.events))
    assert [event.kind for event in events].count("run_started") == 2
    assert not [event.kind for event in events if event.kind in ("resumed", "worker_died", "evicted", "failed")]
    assert started(paths) == first, "the same two processes"
    receipt = json.loads(paths.receipt.read_text())
    undisturbed = reference_receipt(run, LONGER)
    for name in ("weights_sha256", "state_sha256", "samples_seen", "metrics", "best"):
        assert receipt[name] == getattr(undisturbed, name), name


def events_of(paths, kind):
    return [event for event in read_events(paths.events) if event.kind == kind] if paths.events.exists() else []


def started(paths):
    return [event["pid"] for event in events_of(paths, "worker_started")]


def saved_step(paths):
    return max((event.step for event in events_of(paths, "saved")), default=0)


def carrying(paths):
    views = [event for event in events_of(paths, "view") if event.get("carries")]
    return len(views[-1]["carries"]) if views else 0
