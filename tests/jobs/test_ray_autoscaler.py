"""A run on a cluster that Ray's autoscaler makes larger and smaller. Run by `make test-ray`."""

import importlib.util

import pytest

from shoal.jobs import commands
from tests.conftest import MLP
from tests.fleet.ray_autoscaler import autoscaled_ray
from tests.fleet.ray_nodes import ENVIRONMENT
from tests.jobs.background_run import background_run
from tests.jobs.fault_injection import assert_same, reference_receipt
from tests.jobs.test_ray_runs import slow, wait_for

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no ray: make test-ray"),
]
LONGER = MLP | {"steps": 3000, "evaluate": {"every_steps": 100}, "checkpoint": {"every": "50 steps"}}


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with autoscaled_ray(2, tmp_path / "ray.log") as made:
        yield made


def nodes(cluster):
    return set(cluster.ask(do="nodes")["nodes"])


def test_the_cluster_grows_for_workers_and_shrinks_when_they_leave(run, job_dir, cluster):
    """It has no node at first. Each worker needs one of its own."""
    assert nodes(cluster) == set()
    engine = {"kind": "ray", "address": cluster.address}
    with background_run(run, LONGER, workers=1, engine=engine, watchers=slow(job_dir)) as it:
        it.wait_for_workers(1)
        first = nodes(cluster)
        assert len(first) == 1
        commands.scale(it.paths, 2)
        it.wait_for_workers(2)
        assert len(nodes(cluster)) == 2
        commands.scale(it.paths, 1)
        it.wait_until(lambda state: any(worker.state == "left" for worker in state.workers.values()))
        wait_for(lambda: len(nodes(cluster)) == 1, "the node of the worker that left is kept")
        (job_dir / "ready").touch()
    outcome = it.outcome.result()
    assert_same(outcome, reference_receipt(run, LONGER))
    assert outcome.receipt.deaths_survived == 0
    wait_for(lambda: not nodes(cluster), "the cluster does not shrink after the run")
    assert not cluster.groups()


def test_the_cluster_grows_by_a_whole_replica(run, job_dir, cluster):
    """No node has room for both of its workers."""
    sharded = LONGER | {"shard": "fsdp", "workers": 2}
    engine = {"kind": "ray", "address": cluster.address}
    with background_run(run, sharded, engine=engine, watchers=slow(job_dir)) as it:
        it.wait_for_workers(2)
        (group,) = cluster.groups().values()
        assert set(group) == nodes(cluster)
        (job_dir / "ready").touch()
    outcome = it.outcome.result()
    assert outcome.status == "finished", outcome.error
    assert outcome.receipt.weights_sha256 == run(sharded, runs="calm").receipt.weights_sha256
    wait_for(lambda: not nodes(cluster), "the cluster does not shrink after the run")
