"""Where lanes push for themselves: whatever is acknowledged counts once, and nobody gets too far ahead."""

import random
import signal

import pytest
import torch

from shoal.checkpoint import state_format
from shoal.paramserver import protocol
from tests.conftest import long_only
from tests.paramserver.cluster import Cluster, CrashPoint
from tests.paramserver.random_faults import schedule_random_faults
from tests.paramserver.workloads import CounterWorkload, Workload

INFINITE = float("inf")


def assert_counted_once(cluster, results):
    expected = cluster.workload.sum(cluster.steps)
    for seat, result in results.items():
        found = state_format.unpack_state(result["state"]["replica"])["model"]["counters"]
        assert torch.equal(found, expected), f"worker {seat}: {int((found != expected).sum())} keys are wrong"


@pytest.mark.parametrize("staleness", [1, *long_only(3), INFINITE])
@pytest.mark.parametrize(("workers", "servers", "backups"), [(1, 1, 0), (2, 2, 1), (4, 3, 2)])
def test_every_push_counts_once(staleness, workers, servers, backups):
    cluster = Cluster(
        CounterWorkload(),
        workers=workers,
        servers=servers,
        backups=backups,
        staleness=staleness,
        is_remote=lambda seat: seat % 2,
    )
    with cluster:
        assert_counted_once(cluster, cluster.train())
        cluster.assert_backups_equal()


@pytest.mark.parametrize("when", [*long_only("before", "sent"), "after"])
@pytest.mark.parametrize("kind", [protocol.PUSH, protocol.RECORD, protocol.ACK], ids=["push", "record", "ack"])
def test_a_server_dies(kind, when):
    with Cluster(CounterWorkload(), staleness=2, is_remote=lambda seat: seat % 2) as cluster:
        cluster.on_step[2] = [lambda: cluster.schedule_crash(100, CrashPoint(kind, 5, when))]
        cluster.on_step[5] = [lambda: cluster.run_until(lambda: cluster.fully_replicated)]
        assert_counted_once(cluster, cluster.train())
        assert cluster.deaths == 1
        cluster.assert_backups_equal()


@pytest.mark.parametrize("kind", [protocol.SET, protocol.READY], ids=["set", "ready"])
def test_a_server_dies_before_training_begins(kind):
    with Cluster(CounterWorkload(), workers=3, staleness=INFINITE) as cluster:
        cluster.on_table.append(
            lambda table: table.number == 1 and cluster.schedule_crash(101, CrashPoint(kind, 1, "sent"))
        )
        assert_counted_once(cluster, cluster.train())
        assert cluster.deaths == 1
        cluster.assert_backups_equal()


def test_a_worker_dies():
    with Cluster(CounterWorkload(lanes=5), workers=3, staleness=2, steps=12) as cluster:
        cluster.on_step[3] = [cluster.kill_random_worker]
        cluster.on_step[6] = [cluster.kill_random_worker]
        assert_counted_once(cluster, cluster.train())
        cluster.assert_backups_equal()


def test_many_lanes_on_one_worker():
    with Cluster(
        CounterWorkload(keys=500, lanes=128), workers=1, servers=1, backups=0, staleness=1, steps=2
    ) as cluster:
        assert_counted_once(cluster, cluster.train())


def test_it_goes_on_with_other_servers_from_a_checkpoint():
    with Cluster(CounterWorkload(), servers=3, staleness=2, steps=4) as before:
        state = before.train()[0]["state"]
    with Cluster(CounterWorkload(), servers=2, workers=3, staleness=2, steps=9) as cluster:
        assert_counted_once(cluster, cluster.train(state))
        cluster.assert_backups_equal()


def test_moments_and_running_statistics_are_the_same_on_all_copies():
    with Cluster(
        Workload(norm=0.5, weighted_loss=True), workers=3, servers=3, backups=2, staleness=2, steps=10
    ) as cluster:
        cluster.on_step[3] = [lambda: cluster.kill_random_servers(most=2)]
        cluster.on_step[6] = [cluster.kill_random_worker]
        cluster.train()
        cluster.assert_backups_equal()


# ---- staleness ----


def pause(cluster, seat, *, frozen):
    """Stop a worker until the others are as far as they may get without it."""
    cluster.signal(seat, signal.SIGSTOP) if frozen else cluster.send(seat, "pause")
    reached = min(cluster.acked.get(seat, 0) + cluster.staleness, cluster.steps)
    others = [other for other in cluster.workers if other != seat]
    cluster.run_until(lambda: all(cluster.acked.get(other, 0) >= reached for other in others))
    cluster.signal(seat, signal.SIGCONT) if frozen else cluster.send(seat, "go")


@pytest.mark.parametrize("staleness", [1, *long_only(2), 4, INFINITE])
@pytest.mark.parametrize("frozen", [False, *long_only(True)], ids=["waits", "frozen"])
def test_nobody_gets_further_ahead_than_allowed(staleness, frozen):
    """Workers check it themselves with every acknowledgement; here they are made unequal."""
    with Cluster(CounterWorkload(), workers=3, staleness=staleness, steps=20) as cluster:
        cluster.begin()
        for step in range(1, 20, 3):
            cluster.run_until(lambda step=step: cluster.step >= step)
            pause(cluster, cluster.rng.randrange(3), frozen=frozen)
        assert_counted_once(cluster, cluster.finish())


@pytest.mark.parametrize("seed", [0, 1, *long_only(*range(2, 80))])
def test_chaos(seed):
    chance = random.Random(seed)
    backups = chance.choice([1, 2])
    tcp = chance.choice([0, 50, 100])
    cluster = Cluster(
        CounterWorkload(lanes=chance.choice([4, 7])),
        workers=chance.randint(1, 4),
        servers=backups + chance.choice([1, 2]),
        backups=backups,
        steps=16,
        staleness=chance.choice([1, 2, 5, INFINITE]),
        is_remote=lambda seat: seat * 37 % 100 < tcp,
        seed=seed,
    )
    with cluster:
        schedule_random_faults(cluster)
        assert_counted_once(cluster, cluster.train())
        cluster.assert_backups_equal()
