"""Rows on real servers: the same bits whoever holds them, and at whatever moment somebody dies."""

import os
import signal
from unittest.mock import patch

import pytest

from shoal.paramserver import protocol
from shoal.paramserver.requests import Push
from tests.conftest import long_only
from tests.paramserver.cluster import Cluster, CrashPoint
from tests.paramserver.random_faults import schedule_random_faults
from tests.paramserver.sparse.sparse_cluster import SparseWorkload, assert_exact, sparse_cluster_patches
from tests.paramserver.test_kills import MOMENTS

KINDS = {
    "plain": SparseWorkload(),
    "all": SparseWorkload("momentum", norm=0.05, weighted_loss=True),
    "value": SparseWorkload("sgd", value=0.01),
}
MORE = {
    "at a question for rows": CrashPoint(protocol.LOOKUP_ROWS, 3, "before"),
    "after a question for rows": CrashPoint(protocol.LOOKUP_ROWS, 4, "sent"),
}


@pytest.fixture(autouse=True)
def rows():
    with sparse_cluster_patches():
        yield


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("workers", "servers", "backups"), [(2, 2, 0), (3, 3, 2)])
def test_the_same_rows_whoever_holds_them(kind, workers, servers, backups):
    with Cluster(KINDS[kind], workers=workers, servers=servers, backups=backups) as cluster:
        assert_exact(cluster, cluster.train())
        cluster.assert_backups_equal()


@pytest.mark.parametrize("moment", MOMENTS | MORE)
def test_a_server_dies(moment):
    with Cluster(KINDS["all"], workers=2, servers=2, backups=1, is_remote=lambda seat: seat % 2) as cluster:
        cluster.on_step[2] = [lambda: cluster.schedule_crash(100, (MOMENTS | MORE)[moment])]
        cluster.on_step[5] = [lambda: cluster.run_until(lambda: cluster.fully_replicated)]
        assert_exact(cluster, cluster.train())
        assert cluster.deaths == 1
        cluster.assert_backups_equal()


def die_in_the_midst_of(step, *, seat):
    """This worker pushes the first piece of the step, and nothing after it."""
    ask = Push.send

    def last_words(self, server, piece, frame):
        ask(self, server, piece, frame)
        if (frame.seat, self.step) == (seat, step):
            while server.connection.unsent_buffers:
                server.connection.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    return patch.object(Push, "send", last_words)


@pytest.mark.parametrize("more", [*long_only("", "and its server"), "and servers move"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_some_servers_have_done_is_done_again(kind, more):
    """Rows that were changed already are wanted as they were before."""
    with (
        die_in_the_midst_of(5, seat=1),
        Cluster(KINDS[kind], workers=2, servers=2, backups=1, steps=9) as cluster,
    ):

        def after():
            cluster.run_until(lambda: cluster.workers == [0])
            if more == "and its server":
                cluster.kill(cluster.placement.chunk_table.chains[0][0])
                cluster.run_until(lambda: cluster.deaths)
            elif more:
                cluster.placement.scale(4)
                cluster._decide()
                cluster.run_until(lambda: cluster.fully_replicated)
            cluster.change_view()

        cluster.on_step[5] = [after]
        assert_exact(cluster, cluster.train())
        cluster.assert_backups_equal()


@pytest.mark.parametrize("seed", [0, *long_only(*range(1, 40))])
def test_chaos(seed):
    kind = KINDS[sorted(KINDS)[seed % 3]]
    backups = 1 + seed % 2
    cluster = Cluster(
        kind,
        workers=1 + seed % 4,
        servers=backups + 1 + seed // 2 % 2,
        backups=backups,
        steps=16,
        is_remote=lambda seat: seat * 37 % 100 < 50 * (seed % 3),
        seed=seed,
    )
    with cluster:
        schedule_random_faults(cluster)
        assert_exact(cluster, cluster.train())
        cluster.assert_backups_equal()
