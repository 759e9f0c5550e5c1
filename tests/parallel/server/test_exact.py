"""Servers without staleness give the bits of one worker without servers: however many there are, whoever dies."""

import pytest

from tests.parallel.server.cargo import Cargo, alone
from tests.parallel.server.harbour import Harbour

KINDS = {
    "adamw": Cargo(),
    "momentum": Cargo("momentum"),
    "norm": Cargo(norm=0.5),
    "value": Cargo("momentum", value=0.01),
    "counted": Cargo(counted=True),
    "all": Cargo(norm=0.5, counted=True),
}


def check(harbour, results):
    expected, losses = alone(harbour.cargo, harbour.steps)
    assert {seat: result["sha256"] for seat, result in results.items()} == dict.fromkeys(harbour.workers, expected)
    for there in harbour.losses.values():
        assert there == {step: losses[step - 1] for step in there}


@pytest.mark.parametrize("kind", KINDS)
def test_same_bits(kind):
    with Harbour(KINDS[kind], workers=2, servers=2, backups=1) as harbour:
        check(harbour, harbour.sail())
        harbour.check_backups()


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
    harbour = Harbour(
        KINDS["all"], workers=workers, servers=servers, backups=backups, steps=5, elsewhere=lambda seat: seat in tcp
    )
    with harbour:
        check(harbour, harbour.sail())
        harbour.check_backups()
