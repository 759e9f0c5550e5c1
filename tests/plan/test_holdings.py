"""What a table means in bytes."""

from shoal.plan.holdings import Holding, holdings, moved_bytes
from shoal.spec.table import Table

CUTS = [0, 1000, 1600, 1700]


def table(chains, filling=((), (), ())):
    seats = {seat for order in (*chains, *filling) for seat in order}
    addresses = {seat: {"host": "a", "port": seat} for seat in seats}
    return Table(number=1, cuts=CUTS, chains=chains, filling=filling, addresses=addresses)


def test_who_holds_how_much():
    found = holdings(table([[1, 2], [2, 1], [2]], [[], [3], [1]]))
    assert found == {1: Holding(1000, 600, 100), 2: Holding(700, 1000, 0), 3: Holding(0, 0, 600)}


def test_what_a_new_table_moves():
    before = table([[1, 2], [2, 1], [1, 2]], [[], [3], []])
    assert moved_bytes(before, before) == 0, "it was on its way already"
    assert moved_bytes(before, table([[2], [2], [2]])) == 0, "what is left out is not moved"
    assert moved_bytes(before, table([[2], [2], [2]], [[3], [3], [3, 4]])) == 1000 + 100 + 100
