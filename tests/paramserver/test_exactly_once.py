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
    harbour = Cluster(
        CounterWorkload(),
        workers=workers,
        servers=servers,
        backups=backups,
        staleness=staleness,
        is_remote=lambda seat: seat % 2,
    )
    with harbour:
        assert_counted_once(harbour, harbour.train())
        harbour.assert_backups_equal()


@pytest.mark.parametrize("when", [*long_only("before", "sent"), "after"])
@pytest.mark.parametrize("kind", [protocol.PUSH, protocol.RECORD, protocol.ACK], ids=["push", "record", "ack"])
def test_a_server_dies(kind, when):
    with Cluster(CounterWorkload(), staleness=2, is_remote=lambda seat: seat % 2) as harbour:
        harbour.on_step[2] = [lambda: harbour.schedule_crash(100, CrashPoint(kind, 5, when))]
        harbour.on_step[5] = [lambda: harbour.run_until(lambda: harbour.fully_replicated)]
        assert_counted_once(harbour, harbour.train())
        assert harbour.deaths == 1
        harbour.assert_backups_equal()


@pytest.mark.parametrize("kind", [protocol.SET, protocol.READY], ids=["set", "ready"])
def test_a_server_dies_before_training_begins(kind):
    with Cluster(CounterWorkload(), workers=3, staleness=INFINITE) as harbour:
        harbour.on_table.append(
            lambda table: table.number == 1 and harbour.schedule_crash(101, CrashPoint(kind, 1, "sent"))
        )
        assert_counted_once(harbour, harbour.train())
        assert harbour.deaths == 1
        harbour.assert_backups_equal()


def test_a_worker_dies():
    with Cluster(CounterWorkload(lanes=5), workers=3, staleness=2, steps=12) as harbour:
        harbour.on_step[3] = [harbour.kill_random_worker]
        harbour.on_step[6] = [harbour.kill_random_worker]
        assert_counted_once(harbour, harbour.train())
        harbour.assert_backups_equal()


def test_many_lanes_on_one_worker():
    with Cluster(
        CounterWorkload(keys=500, lanes=128), workers=1, servers=1, backups=0, staleness=1, steps=2
    ) as harbour:
        assert_counted_once(harbour, harbour.train())


def test_it_goes_on_with_other_servers_from_a_checkpoint():
    with Cluster(CounterWorkload(), servers=3, staleness=2, steps=4) as before:
        state = before.train()[0]["state"]
    with Cluster(CounterWorkload(), servers=2, workers=3, staleness=2, steps=9) as harbour:
        assert_counted_once(harbour, harbour.train(state))
        harbour.assert_backups_equal()


def test_moments_and_running_statistics_are_the_same_on_all_copies():
    with Cluster(
        Workload(norm=0.5, weighted_loss=True), workers=3, servers=3, backups=2, staleness=2, steps=10
    ) as harbour:
        harbour.on_step[3] = [lambda: harbour.kill_random_servers(most=2)]
        harbour.on_step[6] = [harbour.kill_random_worker]
        harbour.train()
        harbour.assert_backups_equal()


# ---- staleness ----


def pause(harbour, seat, *, frozen):
    """Stop a worker until the others are as far as they may get without it."""
    harbour.signal(seat, signal.SIGSTOP) if frozen else harbour.say(seat, "pause")
    reached = min(harbour.acked.get(seat, 0) + harbour.staleness, harbour.steps)
    others = [other for other in harbour.workers if other != seat]
    harbour.until(lambda: all(harbour.acked.get(other, 0) >= reached for other in others))
    harbour.signal(seat, signal.SIGCONT) if frozen else harbour.say(seat, "go")


@pytest.mark.parametrize("staleness", [1, *long_only(2), 4, INFINITE])
@pytest.mark.parametrize("frozen", [False, *long_only(True)], ids=["waits", "frozen"])
def test_nobody_gets_further_ahead_than_allowed(staleness, frozen):
    """Workers check it themselves with every acknowledgement; here they are made unequal."""
    with Cluster(CounterWorkload(), workers=3, staleness=staleness, steps=20) as harbour:
        harbour.begin()
        for step in range(1, 20, 3):
            harbour.run_until(lambda step=step: harbour.step >= step)
            pause(harbour, harbour.rng.randrange(3), frozen=frozen)
        assert_counted_once(harbour, harbour.finish())


@pytest.mark.parametrize("seed", [0, 1, *long_only(*range(2, 80))])
def test_chaos(seed):
    chance = random.Random(seed)
    backups = chance.choice([1, 2])
    tcp = chance.choice([0, 50, 100])
    harbour = Cluster(
        CounterWorkload(lanes=chance.choice([4, 7])),
        workers=chance.randint(1, 4),
        servers=backups + chance.choice([1, 2]),
        backups=backups,
        steps=16,
        staleness=chance.choice([1, 2, 5, INFINITE]),
        is_remote=lambda seat: seat * 37 % 100 < tcp,
        seed=seed,
    )
    with harbour:
        schedule_random_faults(harbour)
        assert_counted_once(harbour, harbour.train())
        harbour.assert_backups_equal()
