"""What a table means in bytes."""

from shoal.plan.placement_stats import ServerPlacementStats, moved_bytes, placement_stats
from shoal.spec.chunk_table import ChunkTable

CUTS = [0, 1000, 1600, 1700]


def table(chains, filling=((), (), ())):
    seats = {seat for order in (*chains, *filling) for seat in order}
    addresses = {seat: {"host": "a", "port": seat} for seat in seats}
    return ChunkTable(number=1, cuts=CUTS, chains=chains, filling=filling, addresses=addresses)


def test_who_holds_how_much():
    found = placement_stats(table([[1, 2], [2, 1], [2]], [[], [3], [1]]))
    assert found == {
        1: ServerPlacementStats(1000, 600, 100),
        2: ServerPlacementStats(700, 1000, 0),
        3: ServerPlacementStats(0, 0, 600),
    }


def test_what_a_new_table_moves():
    before = table([[1, 2], [2, 1], [1, 2]], [[], [3], []])
    assert moved_bytes(before, before) == 0, "it was on its way already"
    assert moved_bytes(before, table([[2], [2], [2]])) == 0, "what is left out is not moved"
    assert moved_bytes(before, table([[2], [2], [2]], [[3], [3], [3, 4]])) == 1000 + 100 + 100
