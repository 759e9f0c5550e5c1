"""Where lanes push for themselves: whatever is acknowledged counts once, and nobody gets too far ahead."""

import random
import signal

import pytest
import torch

from shoal.checkpoint import live
from shoal.parallel.server import frames
from tests.conftest import long
from tests.parallel.server.cargo import Cargo, Tally
from tests.parallel.server.chaos import chaos
from tests.parallel.server.harbour import Doom, Harbour

INFINITE = float("inf")


def check(harbour, results):
    expected = harbour.cargo.sum(harbour.steps)
    for seat, result in results.items():
        found = live.unpack(result["state"]["replica"])["model"]["counters"]
        assert torch.equal(found, expected), f"worker {seat}: {int((found != expected).sum())} keys are wrong"


@pytest.mark.parametrize("staleness", [1, *long(3), INFINITE])
@pytest.mark.parametrize(("workers", "servers", "backups"), [(1, 1, 0), (2, 2, 1), (4, 3, 2)])
def test_every_push_counts_once(staleness, workers, servers, backups):
    harbour = Harbour(
        Tally(), workers=workers, servers=servers, backups=backups, staleness=staleness, elsewhere=lambda seat: seat % 2
    )
    with harbour:
        check(harbour, harbour.sail())
        harbour.check_backups()


@pytest.mark.parametrize("when", [*long("before", "sent"), "after"])
@pytest.mark.parametrize("kind", [frames.PUSH, frames.RECORD, frames.ACK], ids=["push", "record", "ack"])
def test_a_server_dies(kind, when):
    with Harbour(Tally(), staleness=2, elsewhere=lambda seat: seat % 2) as harbour:
        harbour.on_step[2] = [lambda: harbour.doom(100, Doom(kind, 5, when))]
        harbour.on_step[5] = [lambda: harbour.until(lambda: harbour.whole)]
        check(harbour, harbour.sail())
        assert harbour.deaths == 1
        harbour.check_backups()


@pytest.mark.parametrize("kind", [frames.SET, frames.READY], ids=["set", "ready"])
def test_a_server_dies_before_training_begins(kind):
    with Harbour(Tally(), workers=3, staleness=INFINITE) as harbour:
        harbour.on_table.append(lambda table: table.number == 1 and harbour.doom(101, Doom(kind, 1, "sent")))
        check(harbour, harbour.sail())
        assert harbour.deaths == 1
        harbour.check_backups()


def test_a_worker_dies():
    with Harbour(Tally(lanes=5), workers=3, staleness=2, steps=12) as harbour:
        harbour.on_step[3] = [harbour.lose_worker]
        harbour.on_step[6] = [harbour.lose_worker]
        check(harbour, harbour.sail())
        harbour.check_backups()


def test_many_lanes_on_one_worker():
    with Harbour(Tally(keys=500, lanes=128), workers=1, servers=1, backups=0, staleness=1, steps=2) as harbour:
        check(harbour, harbour.sail())


def test_it_goes_on_with_other_servers_from_a_checkpoint():
    with Harbour(Tally(), servers=3, staleness=2, steps=4) as before:
        state = before.sail()[0]["state"]
    with Harbour(Tally(), servers=2, workers=3, staleness=2, steps=9) as harbour:
        check(harbour, harbour.sail(state))
        harbour.check_backups()


def test_moments_and_running_statistics_are_the_same_on_all_copies():
    with Harbour(Cargo(norm=0.5, counted=True), workers=3, servers=3, backups=2, staleness=2, steps=10) as harbour:
        harbour.on_step[3] = [lambda: harbour.kill_some(most=2)]
        harbour.on_step[6] = [harbour.lose_worker]
        harbour.sail()
        harbour.check_backups()


# ---- staleness ----


def pause(harbour, seat, *, frozen):
    """Stop a worker until the others are as far as they may get without it."""
    harbour.signal(seat, signal.SIGSTOP) if frozen else harbour.say(seat, "pause")
    reached = min(harbour.acked.get(seat, 0) + harbour.staleness, harbour.steps)
    others = [other for other in harbour.workers if other != seat]
    harbour.until(lambda: all(harbour.acked.get(other, 0) >= reached for other in others))
    harbour.signal(seat, signal.SIGCONT) if frozen else harbour.say(seat, "go")


@pytest.mark.parametrize("staleness", [1, *long(2), 4, INFINITE])
@pytest.mark.parametrize("frozen", [False, *long(True)], ids=["waits", "frozen"])
def test_nobody_gets_further_ahead_than_allowed(staleness, frozen):
    """Workers check it themselves with every acknowledgement; here they are made unequal."""
    with Harbour(Tally(), workers=3, staleness=staleness, steps=20) as harbour:
        harbour.begin()
        for step in range(1, 20, 3):
            harbour.until(lambda step=step: harbour.step >= step)
            pause(harbour, harbour.chance.randrange(3), frozen=frozen)
        check(harbour, harbour.finish())


@pytest.mark.parametrize("seed", [0, 1, *long(*range(2, 80))])
def test_chaos(seed):
    chance = random.Random(seed)
    backups = chance.choice([1, 2])
    tcp = chance.choice([0, 50, 100])
    harbour = Harbour(
        Tally(lanes=chance.choice([4, 7])),
        workers=chance.randint(1, 4),
        servers=backups + chance.choice([1, 2]),
        backups=backups,
        steps=16,
        staleness=chance.choice([1, 2, 5, INFINITE]),
        elsewhere=lambda seat: seat * 37 % 100 < tcp,
        seed=seed,
    )
    with harbour:
        chaos(harbour)
        check(harbour, harbour.sail())
        harbour.check_backups()
