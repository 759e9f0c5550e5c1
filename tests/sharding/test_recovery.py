"""What members that meet go on from."""

import itertools

import pytest

from shoal.sharding.recovery import HeldShard, RecoveryPoint, ShardTransfer, plan_transfers, recovery_point


def held(step, part, ways=2, **more):
    return HeldShard(step, part, ways, **more)


NOBODY = HeldShard()

CASES = {
    "nobody has anything": ([NOBODY, NOBODY], None, RecoveryPoint(0)),
    "but a checkpoint is there": ([NOBODY, NOBODY], 7, RecoveryPoint(7)),
    "both have theirs": ([held(9, 0), held(9, 1)], 7, RecoveryPoint(9, {0: 0, 1: 1}, 0)),
    "one part is gone": ([held(9, 0), NOBODY], 7, RecoveryPoint(7, lost_steps=2)),
    "one part is gone, and nothing was saved": ([held(9, 0), NOBODY], None, RecoveryPoint(0, lost_steps=9)),
    "another replica has it": ([held(9, 0), NOBODY, NOBODY, held(9, 1)], 7, RecoveryPoint(9, {0: 0, 1: 3}, 0)),
    "a neighbour keeps a copy": ([held(9, 0, mirrors=1), NOBODY], 7, RecoveryPoint(9, {0: 0, 1: 0}, 0)),
    "one is a step behind, and can follow": (
        [held(8, 0, pending=5), held(9, 1, view=5)],
        7,
        RecoveryPoint(9, {0: 0, 1: 1}, 1, view=5),
    ),
    "one is a step behind, and cannot": ([held(8, 0), held(9, 1)], 7, RecoveryPoint(7, lost_steps=2)),
    "what it voted for counted nowhere, and the step was made again": (
        [held(8, 0, view=4, pending=5), held(9, 0, view=6), held(9, 1, view=6)],
        7,
        RecoveryPoint(9, {0: 1, 1: 2}, 1, view=6),
    ),
    "nobody else has the part of that": (
        [held(8, 0, view=4, pending=5), held(9, 1, view=6)],
        7,
        RecoveryPoint(7, lost_steps=2),
    ),
    "one made the same step in a view that others know nothing of": (
        [held(9, 0, view=5), held(9, 1, view=6), held(9, 0, view=6)],
        7,
        RecoveryPoint(9, {1: 1, 0: 2}, 1, view=6),
    ),
    "the same in the first step of all": (
        [held(0, 0, pending=1), held(1, 1, view=1)],
        None,
        RecoveryPoint(0, lost_steps=1),
    ),
    "all voted, and nobody knows": (
        [held(8, 0, pending=5), held(8, 1, pending=5)],
        7,
        RecoveryPoint(8, {0: 0, 1: 1}, 0),
    ),
    "one knows what was measured": ([held(9, 0), held(9, 1, evaluated=True)], 7, RecoveryPoint(9, {0: 0, 1: 1}, 1)),
    "the checkpoint is newer": ([held(5, 0), held(5, 1)], 7, RecoveryPoint(7)),
    "one has a higher step from before the others returned to a checkpoint": (
        [held(8, 0, view=6), held(8, 1, view=6), held(9, 0, view=4)],
        7,
        RecoveryPoint(8, {0: 0, 1: 1}, 0, view=6),
    ),
    "the newest step lacks a part, and the one before is whole": (
        [held(9, 0, view=6), held(8, 0, view=6), held(8, 1, view=6)],
        7,
        RecoveryPoint(8, {0: 1, 1: 2}, 1, lost_steps=1, view=6),
    ),
    "parts of other layouts": ([held(9, 0, ways=4), held(9, 1, ways=4)], 7, RecoveryPoint(7, lost_steps=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_recovery_point(name):
    brought, saved, expected = CASES[name]
    assert recovery_point(dict(enumerate(brought)), replica_size=2, checkpoint_step=saved) == expected


def test_whatever_is_there_everybody_gets_its_part_from_who_has_it():
    kinds = [NOBODY, *(held(9, part, mirrors=mirror) for part in (0, 1) for mirror in (None, 1 - part)), held(3, 0)]
    for brought in itertools.product(kinds, repeat=4):
        holdings = dict(enumerate(brought))
        found = recovery_point(holdings, replica_size=2, checkpoint_step=4)
        if not found.sources:
            continue
        coming = {move.target_rank: move for move in plan_transfers(found, holdings, replica_size=2)}
        for rank, one in holdings.items():
            if rank in coming:
                source = holdings[coming[rank].source_rank]
                assert coming[rank].shard_rank == rank % 2
                assert source.step == 9
                assert rank % 2 in (source.part, source.mirrors)
            else:
                assert (one.step, one.part) == (9, rank % 2)


def test_a_part_moves_where_its_place_is_another():
    holdings = {0: held(9, 1), 1: held(9, 0)}
    found = recovery_point(holdings, replica_size=2, checkpoint_step=None)
    assert plan_transfers(found, holdings, replica_size=2) == [ShardTransfer(0, 1, 0), ShardTransfer(1, 0, 1)]


def test_who_has_other_bits_of_a_step_gets_those_that_count():
    holdings = {0: held(8, 0, view=4, pending=5), 1: held(9, 1, view=6), 2: held(9, 0, view=6), 3: held(9, 1, view=5)}
    found = recovery_point(holdings, replica_size=2, checkpoint_step=None)
    assert plan_transfers(found, holdings, replica_size=2) == [ShardTransfer(0, 2, 0), ShardTransfer(1, 1, 3)]
