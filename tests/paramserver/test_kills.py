"""Servers and workers die at every moment of the protocol, and nothing is lost, done twice or different."""

import random

import pytest

from shoal.paramserver import protocol
from tests.conftest import long_only
from tests.paramserver.cluster import Cluster, CrashPoint
from tests.paramserver.random_faults import schedule_random_faults
from tests.paramserver.test_bit_exact import KINDS, assert_exact

MOMENTS = {
    "at a push": CrashPoint(protocol.PUSH, 5, "before"),
    "after a push": CrashPoint(protocol.PUSH, 6, "after"),
    "after a push was passed on": CrashPoint(protocol.PUSH, 7, "sent"),
    "before an update is ordered": CrashPoint(protocol.APPLY, 1, "before"),
    "after an update was ordered": CrashPoint(protocol.APPLY, 1, "after"),
    "after an update was passed on": CrashPoint(protocol.APPLY, 2, "sent"),
    "before a record": CrashPoint(protocol.RECORD, 1, "before"),
    "after a record": CrashPoint(protocol.RECORD, 2, "after"),
    "after a record was acknowledged": CrashPoint(protocol.RECORD, 2, "sent"),
    "before an acknowledgement": CrashPoint(protocol.ACK, 2, "before"),
    "after an acknowledgement": CrashPoint(protocol.ACK, 2, "after"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_server_dies(moment):
    with Cluster(KINDS["all"], is_remote=lambda seat: len(moment) % 2) as cluster:
        cluster.on_step[2] = [lambda: cluster.schedule_crash(100, MOMENTS[moment])]
        cluster.on_step[5] = [lambda: cluster.run_until(lambda: cluster.fully_replicated)]
        assert_exact(cluster, cluster.train())
        assert cluster.deaths == 1
        cluster.assert_backups_equal()


@pytest.mark.parametrize(
    "moment", ["after a push", *long_only("after an update was ordered", "before an acknowledgement")]
)
def test_all_hear_that_one_must_stop(moment):
    """In the same step, although the server that heard it first is gone."""
    cluster = Cluster(KINDS["all"], workers=3)
    cluster.halts = {step: step % 3 for step in range(3, 6)}
    with cluster:
        cluster.on_step[3] = [lambda: cluster.schedule_crash(100, MOMENTS[moment])]
        assert_exact(cluster, cluster.train())
        assert sorted(cluster.halted) == [(seat, step + 1) for seat in range(3) for step in range(3, 6)]


@pytest.mark.parametrize("moment", [CrashPoint(protocol.SET, 2, when) for when in ("before", "after", "sent")], ids=str)
def test_a_server_dies_while_it_is_filled(moment):
    with Cluster(KINDS["all"]) as cluster:
        doomed = []

        def doom(table):
            filling = {seat for seats in table.filling for seat in seats}
            if filling and not doomed:
                doomed.extend(filling)
                cluster.schedule_crash(doomed[0], moment)

        cluster.on_table.append(doom)
        cluster.on_step[2] = [lambda: cluster.kill(101)]
        cluster.on_step[5] = [lambda: cluster.run_until(lambda: cluster.fully_replicated)]
        assert_exact(cluster, cluster.train())
        assert cluster.deaths == 2
        cluster.assert_backups_equal()


@pytest.mark.parametrize("kind", [protocol.ACK, protocol.STAMPS, None], ids=["ack", "stamps", "any"])
def test_the_one_dies_that_fills_another(kind):
    with Cluster(KINDS["all"], servers=3, backups=2) as cluster:
        doomed = []

        def doom(table):
            sources = {chain[-1] for chain, filling in zip(table.chains, table.filling, strict=True) if filling}
            if sources and not doomed:
                doomed.append(min(sources))
                assert cluster.survives_without(doomed[0])
                cluster.schedule_crash(doomed[0], CrashPoint(kind, 1, "after"))

        cluster.on_table.append(doom)
        cluster.on_step[2] = [lambda: cluster.kill(101)]
        cluster.on_step[5] = [lambda: cluster.run_until(lambda: cluster.fully_replicated)]
        assert_exact(cluster, cluster.train())
        assert cluster.deaths == 2
        cluster.assert_backups_equal()


def test_both_ends_of_a_link_die():
    with Cluster(KINDS["all"], servers=3, backups=2) as cluster:
        cluster.on_step[3] = [lambda: cluster.kill(*cluster.placement.chunk_table.chains[0][:2])]
        assert_exact(cluster, cluster.train())
        assert cluster.deaths == 2
        cluster.assert_backups_equal()


@pytest.mark.parametrize("kind", [protocol.PUSH, protocol.APPLY], ids=["push", "apply"])
def test_the_new_primary_dies_at_once(kind):
    with Cluster(KINDS["all"], servers=3, backups=2) as cluster:
        fallen = []

        def doom(table):
            if fallen and not cluster.children[fallen[1]].will_die:
                assert table.chains[0][0] == fallen[1]
                cluster.schedule_crash(fallen[1], CrashPoint(kind, 1, "after"))

        def fall():
            fallen.extend(cluster.placement.chunk_table.chains[0])
            cluster.kill(fallen[0])

        cluster.on_table.append(doom)
        cluster.on_step[3] = [fall]
        assert_exact(cluster, cluster.train())
        assert cluster.deaths == 2
        cluster.assert_backups_equal()


@pytest.mark.parametrize("backups", [0, 1])
def test_servers_come_and_go_while_training_goes_on(backups):
    with Cluster(KINDS["all"], servers=2, backups=backups, steps=12) as cluster:
        cluster.on_step[1] = [lambda: cluster.scale(4)]
        cluster.on_step[5] = [lambda: cluster.run_until(lambda: cluster.fully_replicated), lambda: cluster.drain(100)]
        cluster.on_step[8] = [lambda: cluster.scale(2)]
        assert_exact(cluster, cluster.train())
        cluster.run_until(lambda: len(cluster.servers) == 2)
        cluster.assert_backups_equal()


@pytest.mark.parametrize("end", ["gives", "gets"])
def test_a_server_dies_during_a_move(end):
    with Cluster(KINDS["all"], steps=12) as cluster:
        doom = CrashPoint(protocol.SET, 3)
        dies = (
            (lambda: cluster.kill_random_servers(most=1))
            if end == "gives"
            else (lambda: cluster.schedule_crash(102, doom))
        )
        cluster.on_step[2] = [lambda: cluster.scale(4), dies]
        cluster.on_step[5] = [lambda: cluster.run_until(lambda: cluster.deaths)]  # a new server may come late
        assert_exact(cluster, cluster.train())
        assert cluster.deaths == 1
        cluster.assert_backups_equal()


def test_a_worker_comes_late_with_an_old_table():
    with Cluster(KINDS["all"], steps=10) as cluster:
        cluster.late_seats = {0}
        for step in (2, 4, 6):
            cluster.on_step[step] = [
                lambda: cluster.run_until(lambda: cluster.fully_replicated and not cluster.dying),
                lambda: cluster.kill_random_servers(most=1),
            ]
        assert_exact(cluster, cluster.train())
        assert cluster.deaths == 3
        cluster.assert_backups_equal()


@pytest.mark.parametrize("tcp", [False, True], ids=["shared", "tcp"])
def test_a_connection_breaks_and_no_process_dies(tcp):
    with Cluster(KINDS["all"], steps=20, is_remote=lambda seat: tcp) as cluster:
        for step in range(1, 19):
            cluster.on_step[step] = [cluster.break_connection]
        assert_exact(cluster, cluster.train())
        assert cluster.deaths == 0
        cluster.assert_backups_equal()


@pytest.mark.parametrize("when", [*long_only("before", "after"), "sent"])
@pytest.mark.parametrize("kind", ["ENTER", "SET", "READY", "JOIN"])
def test_a_server_dies_before_training_begins(kind, when):
    doom = CrashPoint(getattr(protocol, kind), 1, when)
    with Cluster(KINDS["all"]) as cluster:
        cluster.on_table.append(lambda table: table.number == 1 and cluster.schedule_crash(101, doom))
        assert_exact(cluster, cluster.train())
        assert cluster.deaths == 1
        cluster.assert_backups_equal()


@pytest.mark.parametrize("kind", ["all", *long_only("momentum")])
def test_a_worker_dies(kind):
    with Cluster(KINDS[kind], workers=3, steps=10) as cluster:
        cluster.on_step[2] = [cluster.kill_random_worker]
        cluster.on_step[5] = [cluster.kill_random_worker]
        assert_exact(cluster, cluster.train())
        assert len(cluster.workers) == 1
        cluster.assert_backups_equal()


@pytest.mark.parametrize("kind", [*long_only("norm", "counted"), "all"])
def test_a_worker_dies_that_alone_knew_the_norm(kind):
    """Some chunks have the step then and some do not, and nobody who lives knows all norms."""
    with Cluster(KINDS[kind], workers=2) as cluster:
        cluster.on_step[2] = [lambda: cluster.request(1, "mute"), lambda: cluster.send(0, "doom")]
        assert_exact(cluster, cluster.train())
        cluster.assert_backups_equal()


@pytest.mark.parametrize("when", [*long_only("before", "after"), "sent"])
def test_a_server_dies_while_everything_is_pulled(when):
    with Cluster(KINDS["all"], workers=3) as cluster:
        cluster.on_step[cluster.steps - 1] = [lambda: cluster.schedule_crash(101, CrashPoint(protocol.PULL, 3, when))]
        assert_exact(cluster, cluster.train())
        assert cluster.deaths == 1


def test_it_goes_on_with_other_servers_from_a_checkpoint():
    with Cluster(KINDS["all"], servers=3, workers=2, steps=4) as before:
        state = before.train()[0]["state"]
    with Cluster(KINDS["all"], servers=2, workers=3, steps=9) as cluster:
        assert_exact(cluster, cluster.train(state))
        cluster.assert_backups_equal()


@pytest.mark.parametrize("seed", [0, 1, 2, *long_only(*range(3, 100))])
def test_chaos(seed):
    """Anything at any time, as long as every chunk has a holder left."""
    chance = random.Random(seed)
    backups = chance.choice([1, 2])
    tcp = chance.choice([0, 50, 100])
    cluster = Cluster(
        KINDS[chance.choice(list(KINDS))],
        workers=chance.randint(1, 4),
        servers=backups + chance.choice([1, 2]),
        backups=backups,
        steps=16,
        is_remote=lambda seat: seat * 37 % 100 < tcp,
        seed=seed,
    )
    with cluster:
        schedule_random_faults(cluster)
        assert_exact(cluster, cluster.train())
        cluster.assert_backups_equal()
