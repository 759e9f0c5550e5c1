"""Who carries which lanes: complete, even, aligned, fast, and calm."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.lanes.reduction_tree import partial_nodes
from shoal.plan.lane_assignment import assign_by_speed, assign_evenly, partial_sum_count, step_s

paces = st.floats(0.001, 1000, allow_nan=False)
crews = st.dictionaries(st.integers(0, 99), st.none() | paces, min_size=1, max_size=6)


def assert_is_assignment(carries, lanes, seats):
    """Every lane once, to each seat a run of neighbours."""
    assert set(carries) == set(seats)
    assert sorted(itertools.chain(*carries.values())) == list(range(lanes))
    for mine in carries.values():
        assert mine == list(range(mine[0], mine[0] + len(mine))) if mine else True


def all_partials(carries, lanes):
    return sum(len(partial_nodes(mine, lanes)) for mine in carries.values())


@given(st.integers(1, 70), st.data())
def test_partials_are_counted_as_the_tree_makes_them(lanes, data):
    first = data.draw(st.integers(0, lanes))
    end = data.draw(st.integers(first, lanes))
    assert partial_sum_count(first, end, lanes) == len(partial_nodes(range(first, end), lanes))


# ---- equal ----


@given(st.integers(1, 70), st.lists(st.integers(0, 999), min_size=1, max_size=12, unique=True))
def test_equal_shares_differ_by_at_most_one(lanes, seats):
    carries = assign_evenly(lanes, seats)
    assert_is_assignment(carries, lanes, seats)
    sizes = [len(mine) for mine in carries.values()]
    assert max(sizes) - min(sizes) <= 1
    assert [lane for seat in seats for lane in carries[seat]] == list(range(lanes))


@given(st.integers(1, 20), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_equal_blocks_make_as_few_partials_as_can_be(lanes, seats):
    carries = assign_evenly(lanes, range(seats))
    sizes = [len(mine) for mine in carries.values() if mine]
    fewest = min(
        sum(
            partial_sum_count(end - size, end, lanes)
            for size, end in zip(order, itertools.accumulate(order), strict=True)
        )
        for order in set(itertools.permutations(sizes))
    )
    assert all_partials(carries, lanes) == fewest


def test_powers_of_two_need_one_partial_each():
    for lanes, workers in [(8, 1), (8, 2), (8, 4), (64, 16)]:
        assert all_partials(assign_evenly(lanes, range(workers)), lanes) == workers


def test_equal_examples():
    assert assign_evenly(4, [5, 2]) == {5: [0, 1], 2: [2, 3]}
    assert assign_evenly(2, [7, 8, 9]) == {7: [0], 8: [1], 9: []}
    assert assign_evenly(3, [1, 2]) == {1: [0, 1], 2: [2]}
    assert assign_evenly(5, [0, 1, 2]) == {0: [0, 1], 1: [2, 3], 2: [4]}
    assert assign_evenly(8, []) == {}


def test_many_workers_are_assigned_quickly():
    assert_is_assignment(assign_evenly(1000, range(300)), 1000, range(300))


# ---- shares ----


@given(st.integers(1, 40), crews)
@settings(deadline=None)
def test_shares_are_a_lane_assignment(lanes, lane_s):
    assert_is_assignment(assign_by_speed(lanes, lane_s), lanes, lane_s)


@given(st.integers(1, 9), st.dictionaries(st.integers(0, 9), paces, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_no_other_assignment_is_much_faster(lanes, pace):
    """Against all deals: the best with everybody in, or else at most the tolerance above the best of all."""

    def slowest(counts):
        return max(count * s for count, s in zip(counts, pace.values(), strict=True))

    deals = [c for c in itertools.product(range(lanes + 1), repeat=len(pace)) if sum(c) == lanes]
    everybody = [c for c in deals if 0 not in c]
    found = step_s(assign_by_speed(lanes, pace), pace)
    assert found < 1.3 * min(map(slowest, deals)) * (1 + 1e-9)
    if everybody:
        assert found <= min(map(slowest, everybody)) * (1 + 1e-9)


def test_a_worker_of_half_the_speed_carries_half_as_much():
    carries = assign_by_speed(12, {0: 1.0, 1: 2.0, 2: 1.0})
    assert [len(carries[seat]) for seat in (0, 1, 2)] == [5, 2, 5]


def test_who_is_not_measured_counts_as_the_median():
    carries = assign_by_speed(10, {0: 1.0, 1: 3.0, 2: None, 3: 1.0})
    assert [len(carries[seat]) for seat in range(4)] == [3, 1, 3, 3]
    assert assign_by_speed(8, {4: None, 5: None}) == assign_evenly(8, [4, 5])


@pytest.mark.parametrize("nonsense", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_time_counts_as_not_measured(nonsense):
    assert assign_by_speed(8, {0: 1.0, 1: nonsense}) == assign_by_speed(8, {0: 1.0, 1: None})


def test_of_more_seats_than_lanes_the_fastest_work():
    assert {seat for seat, mine in assign_by_speed(2, {0: 1.0, 1: 0.5, 2: 0.9, 3: 1.1}).items() if mine} == {1, 2}


def test_a_slow_worker_keeps_a_lane_unless_it_costs_too_much():
    assert len(assign_by_speed(8, {0: 1.0, 1: 1.0, 2: 5.0})[2]) == 1  # 5.0 s with it, 4.0 s without: 1.25 times
    assert assign_by_speed(8, {0: 1.0, 1: 1.0, 2: 5.3})[2] == []  # 1.33 times


def test_two_hopeless_ones_are_left_out_together():
    carries = assign_by_speed(8, {0: 1.0, 1: 1.0, 2: 50.0, 3: 50.0, 4: 49.0})
    assert [len(carries[seat]) for seat in range(5)] == [4, 4, 0, 0, 0]


def test_the_order_is_changed_where_that_saves_partials():
    pace = {0: 4.0, 1: 1.0, 2: 2.0, 3: 4.0}
    carries = assign_by_speed(8, pace)
    assert [len(carries[seat]) for seat in range(4)] == [1, 4, 2, 1]
    assert all_partials(carries, 8) == 4
