"""Servers without staleness give the bits of one worker without servers: however many there are, whoever dies."""

import pytest

from tests.paramserver.cluster import Cluster
from tests.paramserver.workloads import Workload, single_worker

KINDS = {
    "adamw": Workload(),
    "momentum": Workload("momentum"),
    "norm": Workload(norm=0.5),
    "value": Workload("momentum", value=0.01),
    "counted": Workload(weighted_loss=True),
    "all": Workload(norm=0.5, weighted_loss=True),
}


def assert_exact(cluster, results):
    expected, losses = single_worker(cluster.workload, cluster.steps)
    assert {seat: result["sha256"] for seat, result in results.items()} == dict.fromkeys(cluster.workers, expected)
    for there in cluster.losses.values():
        assert there == {step: losses[step - 1] for step in there}


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits(kind):
    with Cluster(KINDS[kind], workers=2, servers=2, backups=1) as cluster:
        assert_exact(cluster, cluster.train())
        cluster.assert_backups_equal()


@pytest.mark.parametrize(
    ("workers", "servers", "backups", "tcp"),
    [
        (1, 1, 0, ()),
        (1, 4, 2, (101, 102)),
        (2, 1, 0, (100,)),
        (3, 3, 2, (101,)),
        (4, 2, 0, (101,)),
        (4, 4, 1, range(999)),
    ],
)
def test_any_number_of_workers_and_servers(workers, servers, backups, tcp):
    cluster = Cluster(
        KINDS["all"], workers=workers, servers=servers, backups=backups, steps=5, is_remote=lambda seat: seat in tcp
    )
    with cluster:
        assert_exact(cluster, cluster.train())
        cluster.assert_backups_equal()
