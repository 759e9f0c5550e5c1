"""Rows on real servers: the same bits whoever holds them, and at whatever moment somebody dies."""

import os
import signal
from unittest.mock import patch

import pytest

from shoal.parallel.server import frames
from shoal.parallel.server.errands import Push
from tests.conftest import long
from tests.parallel.server.chaos import chaos
from tests.parallel.server.harbour import Doom, Harbour
from tests.parallel.server.test_kills import MOMENTS
from tests.parallel.sparse.fleet import Wordy, check, sparse

KINDS = {"plain": Wordy(), "all": Wordy("momentum", norm=0.05, counted=True), "value": Wordy("sgd", value=0.01)}
MORE = {
    "at a question for rows": Doom(frames.LOOK_UP, 3, "before"),
    "after a question for rows": Doom(frames.LOOK_UP, 4, "sent"),
}


@pytest.fixture(autouse=True)
def rows():
    with sparse():
        yield


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("workers", "servers", "backups"), [(2, 2, 0), (3, 3, 2)])
def test_the_same_rows_whoever_holds_them(kind, workers, servers, backups):
    with Harbour(KINDS[kind], workers=workers, servers=servers, backups=backups) as harbour:
        check(harbour, harbour.sail())
        harbour.check_backups()


@pytest.mark.parametrize("moment", MOMENTS | MORE)
def test_a_server_dies(moment):
    with Harbour(KINDS["all"], workers=2, servers=2, backups=1, elsewhere=lambda seat: seat % 2) as harbour:
        harbour.on_step[2] = [lambda: harbour.doom(100, (MOMENTS | MORE)[moment])]
        harbour.on_step[5] = [lambda: harbour.until(lambda: harbour.whole)]
        check(harbour, harbour.sail())
        assert harbour.deaths == 1
        harbour.check_backups()


def die_in_the_midst_of(step, *, seat):
    """This worker pushes the first piece of the step, and nothing after it."""
    ask = Push.ask

    def last_words(self, server, piece, frame):
        ask(self, server, piece, frame)
        if (frame.seat, self.step) == (seat, step):
            while server.line.unsent:
                server.line.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    return patch.object(Push, "ask", last_words)


@pytest.mark.parametrize("more", [*long("", "and its server"), "and servers move"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_some_servers_have_done_is_done_again(kind, more):
    """Rows that were changed already are wanted as they were before."""
    with (
        die_in_the_midst_of(5, seat=1),
        Harbour(KINDS[kind], workers=2, servers=2, backups=1, steps=9) as harbour,
    ):

        def after():
            harbour.until(lambda: harbour.workers == [0])
            if more == "and its server":
                harbour.kill(harbour.placement.table.chains[0][0])
                harbour.until(lambda: harbour.deaths)
            elif more:
                harbour.placement.scale(4)
                harbour._decide()
                harbour.until(lambda: harbour.whole)
            harbour.change_view()

        harbour.on_step[5] = [after]
        check(harbour, harbour.sail())
        harbour.check_backups()


@pytest.mark.parametrize("seed", [0, *long(*range(1, 40))])
def test_chaos(seed):
    kind = KINDS[sorted(KINDS)[seed % 3]]
    backups = 1 + seed % 2
    harbour = Harbour(
        kind,
        workers=1 + seed % 4,
        servers=backups + 1 + seed // 2 % 2,
        backups=backups,
        steps=16,
        elsewhere=lambda seat: seat * 37 % 100 < 50 * (seed % 3),
        seed=seed,
    )
    with harbour:
        chaos(harbour)
        check(harbour, harbour.sail())
        harbour.check_backups()
