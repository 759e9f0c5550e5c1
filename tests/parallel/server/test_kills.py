"""Servers and workers die at every moment of the protocol, and nothing is lost, done twice or different."""

import random

import pytest

from shoal.parallel.server import frames
from tests.conftest import long
from tests.parallel.server.chaos import chaos
from tests.parallel.server.harbour import Doom, Harbour
from tests.parallel.server.test_exact import KINDS, check

MOMENTS = {
    "at a push": Doom(frames.PUSH, 5, "before"),
    "after a push": Doom(frames.PUSH, 6, "after"),
    "after a push was passed on": Doom(frames.PUSH, 7, "sent"),
    "before an update is ordered": Doom(frames.APPLY, 1, "before"),
    "after an update was ordered": Doom(frames.APPLY, 1, "after"),
    "after an update was passed on": Doom(frames.APPLY, 2, "sent"),
    "before a record": Doom(frames.RECORD, 3, "before"),
    "after a record": Doom(frames.RECORD, 4, "after"),
    "after a record was acknowledged": Doom(frames.RECORD, 5, "sent"),
    "before an acknowledgement": Doom(frames.ACK, 2, "before"),
    "after an acknowledgement": Doom(frames.ACK, 2, "after"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_server_dies(moment):
    with Harbour(KINDS["all"], elsewhere=lambda seat: len(moment) % 2) as harbour:
        harbour.on_step[2] = [lambda: harbour.doom(100, MOMENTS[moment])]
        harbour.on_step[5] = [lambda: harbour.until(lambda: harbour.whole)]
        check(harbour, harbour.sail())
        assert harbour.deaths == 1
        harbour.check_backups()


@pytest.mark.parametrize("moment", ["after a push", *long("after an update was ordered", "before an acknowledgement")])
def test_all_hear_that_one_must_stop(moment):
    """In the same step, although the server that heard it first is gone."""
    harbour = Harbour(KINDS["all"], workers=3)
    harbour.halts = {step: step % 3 for step in range(3, 6)}
    with harbour:
        harbour.on_step[3] = [lambda: harbour.doom(100, MOMENTS[moment])]
        check(harbour, harbour.sail())
        assert sorted(harbour.halted) == [(seat, step + 1) for seat in range(3) for step in range(3, 6)]


@pytest.mark.parametrize("moment", [Doom(frames.SET, 2, when) for when in ("before", "after", "sent")], ids=str)
def test_a_server_dies_while_it_is_filled(moment):
    with Harbour(KINDS["all"]) as harbour:
        doomed = []

        def doom(table):
            filling = {seat for seats in table.filling for seat in seats}
            if filling and not doomed:
                doomed.extend(filling)
                harbour.doom(doomed[0], moment)

        harbour.on_table.append(doom)
        harbour.on_step[2] = [lambda: harbour.kill(101)]
        harbour.on_step[5] = [lambda: harbour.until(lambda: harbour.whole)]
        check(harbour, harbour.sail())
        assert harbour.deaths == 2
        harbour.check_backups()


@pytest.mark.parametrize("kind", [frames.ACK, frames.STAMPS, None], ids=["ack", "stamps", "any"])
def test_the_one_dies_that_fills_another(kind):
    with Harbour(KINDS["all"], servers=3, backups=2) as harbour:
        doomed = []

        def doom(table):
            sources = {chain[-1] for chain, filling in zip(table.chains, table.filling, strict=True) if filling}
            if sources and not doomed:
                doomed.append(min(sources))
                assert harbour.spares(doomed[0])
                harbour.doom(doomed[0], Doom(kind, 1, "after"))

        harbour.on_table.append(doom)
        harbour.on_step[2] = [lambda: harbour.kill(101)]
        harbour.on_step[5] = [lambda: harbour.until(lambda: harbour.whole)]
        check(harbour, harbour.sail())
        assert harbour.deaths == 2
        harbour.check_backups()


def test_both_ends_of_a_link_die():
    with Harbour(KINDS["all"], servers=3, backups=2) as harbour:
        harbour.on_step[3] = [lambda: harbour.kill(*harbour.placement.table.chains[0][:2])]
        check(harbour, harbour.sail())
        assert harbour.deaths == 2
        harbour.check_backups()


@pytest.mark.parametrize("kind", [frames.PUSH, frames.APPLY], ids=["push", "apply"])
def test_the_new_primary_dies_at_once(kind):
    with Harbour(KINDS["all"], servers=3, backups=2) as harbour:
        fallen = []

        def doom(table):
            if fallen and not harbour.children[fallen[1]].doomed:
                assert table.chains[0][0] == fallen[1]
                harbour.doom(fallen[1], Doom(kind, 1, "after"))

        def fall():
            fallen.extend(harbour.placement.table.chains[0])
            harbour.kill(fallen[0])

        harbour.on_table.append(doom)
        harbour.on_step[3] = [fall]
        check(harbour, harbour.sail())
        assert harbour.deaths == 2
        harbour.check_backups()


@pytest.mark.parametrize("backups", [0, 1])
def test_servers_come_and_go_while_training_goes_on(backups):
    with Harbour(KINDS["all"], servers=2, backups=backups, steps=12) as harbour:
        harbour.on_step[1] = [lambda: harbour.scale(4)]
        harbour.on_step[5] = [lambda: harbour.until(lambda: harbour.whole), lambda: harbour.drain(100)]
        harbour.on_step[8] = [lambda: harbour.scale(2)]
        check(harbour, harbour.sail())
        harbour.until(lambda: len(harbour.servers) == 2)
        harbour.check_backups()


@pytest.mark.parametrize("end", ["gives", "gets"])
def test_a_server_dies_during_a_move(end):
    with Harbour(KINDS["all"], steps=12) as harbour:
        doom = Doom(frames.SET, 3)
        dies = (lambda: harbour.kill_some(most=1)) if end == "gives" else (lambda: harbour.doom(102, doom))
        harbour.on_step[2] = [lambda: harbour.scale(4), dies]
        check(harbour, harbour.sail())
        assert harbour.deaths == 1
        harbour.check_backups()


def test_a_worker_comes_late_with_an_old_table():
    with Harbour(KINDS["all"], steps=10) as harbour:
        harbour.late = {0}
        for step in (2, 4, 6):
            harbour.on_step[step] = [lambda: harbour.until(lambda: harbour.whole), lambda: harbour.kill_some(most=1)]
        check(harbour, harbour.sail())
        assert harbour.deaths == 3
        harbour.check_backups()


@pytest.mark.parametrize("tcp", [False, True], ids=["shared", "tcp"])
def test_a_line_breaks_and_nobody_dies(tcp):
    with Harbour(KINDS["all"], steps=20, elsewhere=lambda seat: tcp) as harbour:
        for step in range(1, 19):
            harbour.on_step[step] = [harbour.cut]
        check(harbour, harbour.sail())
        assert harbour.deaths == 0
        harbour.check_backups()


@pytest.mark.parametrize("when", [*long("before", "after"), "sent"])
@pytest.mark.parametrize("kind", ["ENTER", "SET", "READY", "JOIN"])
def test_a_server_dies_before_training_begins(kind, when):
    doom = Doom(getattr(frames, kind), 1, when)
    with Harbour(KINDS["all"]) as harbour:
        harbour.on_table.append(lambda table: table.number == 1 and harbour.doom(101, doom))
        check(harbour, harbour.sail())
        assert harbour.deaths == 1
        harbour.check_backups()


@pytest.mark.parametrize("kind", ["all", *long("momentum")])
def test_a_worker_dies(kind):
    with Harbour(KINDS[kind], workers=3, steps=10) as harbour:
        harbour.on_step[2] = [harbour.lose_worker]
        harbour.on_step[5] = [harbour.lose_worker]
        check(harbour, harbour.sail())
        assert len(harbour.workers) == 1
        harbour.check_backups()


@pytest.mark.parametrize("kind", [*long("norm", "counted"), "all"])
def test_a_worker_dies_that_alone_knew_the_norm(kind):
    """Some chunks have the step then and some do not, and nobody who lives knows all norms."""
    with Harbour(KINDS[kind], workers=2) as harbour:
        harbour.on_step[2] = [lambda: harbour.ask(1, "mute"), lambda: harbour.say(0, "doom")]
        check(harbour, harbour.sail())
        harbour.check_backups()


@pytest.mark.parametrize("when", [*long("before", "after"), "sent"])
def test_a_server_dies_while_everything_is_pulled(when):
    with Harbour(KINDS["all"], workers=3) as harbour:
        harbour.on_step[harbour.steps - 1] = [lambda: harbour.doom(101, Doom(frames.PULL, 3, when))]
        check(harbour, harbour.sail())
        assert harbour.deaths == 1


def test_it_goes_on_with_other_servers_from_a_checkpoint():
    with Harbour(KINDS["all"], servers=3, workers=2, steps=4) as before:
        state = before.sail()[0]["state"]
    with Harbour(KINDS["all"], servers=2, workers=3, steps=9) as harbour:
        check(harbour, harbour.sail(state))
        harbour.check_backups()


@pytest.mark.parametrize("seed", [0, 1, 2, *long(*range(3, 100))])
def test_chaos(seed):
    """Anything at any time, as long as every chunk has a holder left."""
    chance = random.Random(seed)
    backups = chance.choice([1, 2])
    tcp = chance.choice([0, 50, 100])
    harbour = Harbour(
        KINDS[chance.choice(list(KINDS))],
        workers=chance.randint(1, 4),
        servers=backups + chance.choice([1, 2]),
        backups=backups,
        steps=16,
        elsewhere=lambda seat: seat * 37 % 100 < tcp,
        seed=seed,
    )
    with harbour:
        chaos(harbour)
        check(harbour, harbour.sail())
        harbour.check_backups()
