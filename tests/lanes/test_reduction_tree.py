"""The sum over lanes has the same bits whoever carries which lane."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.lanes.reduction_tree import TreeSum, partial_nodes


def combine(left, right):
    return f"({left}+{right})"


def whole(lanes, values):
    tree = TreeSum(lanes, combine)
    for lane in range(lanes):
        tree.push_lane(lane, values[lane])
    return tree.total()


def test_the_shape_depends_on_lane_numbers_alone():
    assert whole(4, list("abcd")) == "((a+b)+(c+d))"
    assert whole(5, list("abcde")) == "(((a+b)+(c+d))+e)"
    assert whole(6, list("abcdef")) == "(((a+b)+(c+d))+(e+f))"
    assert whole(1, ["a"]) == "a"


def test_a_lane_without_samples_adds_nothing():
    assert whole(4, ["a", None, None, "d"]) == "(a+d)"
    assert whole(2, [None, None]) is None


@given(st.integers(1, 33), st.integers(1, 9), st.integers(0, 2**32))
def test_any_partition_among_workers_gives_the_same_sum(lanes, workers, seed):
    rng = random.Random(seed)
    values = [None if rng.random() < 0.2 else f"l{lane}" for lane in range(lanes)]
    carried = [[] for _ in range(workers)]
    for lane in range(lanes):
        rng.choice(carried).append(lane)
    total = TreeSum(lanes, combine)
    partials = []
    for mine in carried:
        own = TreeSum(lanes, combine)
        rng.shuffle(mine)
        for lane in mine:
            own.push_lane(lane, values[lane])
        assert sorted(own.partials) == sorted(partial_nodes(mine, lanes))
        partials += own.partials.items()
    rng.shuffle(partials)
    for node, value in partials:
        total.push(node, value)
    assert total.total() == whole(lanes, values)


@given(st.integers(0, 10), st.integers(0, 10))
def test_an_aligned_block_is_one_partial(level, block):
    lanes = 2**level * (block + 1)
    mine = range(block * 2**level, (block + 1) * 2**level)
    assert len(partial_nodes(mine, lanes)) == 1


@given(st.integers(1, 64), st.data())
def test_a_run_of_lanes_needs_few_partials(lanes, data):
    first = data.draw(st.integers(0, lanes - 1))
    last = data.draw(st.integers(first, lanes - 1))
    assert len(partial_nodes(range(first, last + 1), lanes)) <= 2 * max(lanes.bit_length(), 1)


def test_few_values_are_held_in_rising_order():
    tree = TreeSum(64, combine)
    for lane in range(64):
        tree.push_lane(lane, "x")
        assert len(tree.partials) <= 7


def test_incomplete_and_doubled_sums_are_refused():
    tree = TreeSum(4, combine)
    tree.push_lane(0, "a")
    with pytest.raises(ValueError, match="not complete"):
        tree.total()
    with pytest.raises(ValueError, match="twice"):
        tree.push_lane(0, "a")
