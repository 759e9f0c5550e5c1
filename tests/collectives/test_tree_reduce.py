"""The parts of the exchange that need no peers: how sums lie in memory, and in which order they are added."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.collectives import tree_reduce
from shoal.collectives.allreduce_plan import ONE_PHASE_MAX_BYTES, AllReducePlan
from shoal.collectives.tree_reduce import TreeReduce, build_sum_tree
from shoal.lanes.flat_layout import FlatLayout, split_evenly, write_lane_sum
from shoal.lanes.reduction_tree import TreeSum, partial_nodes
from shoal.lanes.replica import LaneSum, add

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=5)
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


@st.composite
def layouts(draw):
    """A function that makes lane sums of one and the same kind."""
    kinds = [(shape, draw(DTYPES)) for shape in draw(SHAPES)]
    moving = [(shape, draw(DTYPES)) for shape in draw(SHAPES)[1:]]
    first = [(shape, draw(st.sampled_from([torch.int64, torch.bool, torch.uint8]))) for shape in draw(SHAPES)[1:]]

    def make(seed):
        generator = torch.Generator().manual_seed(seed)
        new = lambda kind: torch.randn(kind[0], generator=generator).to(kind[1])  # noqa: E731
        loss = torch.randn((), generator=generator, dtype=torch.float64)
        return LaneSum(list(map(new, kinds)), list(map(new, moving)), list(map(new, first)), loss, loss + 1)

    return make


def flat(value):
    return [*value.grads, *value.float_buffers, *value.int_buffers, value.loss, value.count]


def bits(value):
    return [(t.dtype, t.shape, t.contiguous().flatten().view(torch.uint8).tolist()) for t in flat(value)]


@given(layouts())
def test_what_is_written_comes_back_and_nothing_overlaps(make):
    layout = FlatLayout(make(0))
    stretch = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    value = make(1)
    assert layout.fits(value)
    write_lane_sum(layout.views(stretch), value)
    assert bits(layout.views(stretch)) == bits(value)
    assert all(t.data_ptr() % 64 == stretch.data_ptr() % 64 for t in flat(layout.views(stretch)) if t.numel())
    assert layout.digest == FlatLayout(make(2)).digest


def test_other_kinds_do_not_fit():
    def make(grad):
        zero = torch.zeros((), dtype=torch.float64)
        return LaneSum([grad], [], [], zero)

    layout = FlatLayout(make(torch.zeros(3, 4)))
    assert layout.fits(make(torch.ones(3, 4)))
    assert not layout.fits(make(torch.ones(3, 4).double()))
    assert not layout.fits(make(torch.ones(4, 3)))
    assert not layout.fits(make(torch.ones(3, 4).to_sparse()))
    assert layout.digest != FlatLayout(make(torch.zeros(4, 3))).digest


@given(st.integers(0, 5000), st.integers(1, 40))
def test_shares_cover_a_flat_buffer_without_gaps(blocks, count):
    members = sorted(random.Random(blocks).sample(range(1000), count))
    cut = split_evenly(64 * blocks, members)
    assert list(cut) == members
    edges = [0, *(stop for _, stop in cut.values())]
    assert [start for start, _ in cut.values()] == edges[:-1]
    assert edges[-1] == 64 * blocks
    assert all(start % 64 == 0 for start in edges)
    assert max(b - a for a, b in cut.values()) - min(b - a for a, b in cut.values()) <= 64


@given(layouts(), st.integers(1, 13), st.integers(1, 6), st.integers(0, 2**32))
def test_any_lane_assignment_and_any_slicing_give_the_bits_of_the_tree(make, lanes, workers, seed):
    rng = random.Random(seed)
    empty = {lane for lane in range(lanes) if rng.random() < 0.25} if lanes > 1 else set()
    if len(empty) == lanes:
        empty.pop()
    whole = TreeSum(lanes, add)
    for lane in range(lanes):
        whole.push_lane(lane, None if lane in empty else make(lane))
    layout = FlatLayout(make(0))
    partials = []
    for nodes in partition(lanes, workers, rng):
        own = TreeSum(lanes, add)
        for lane in nodes:
            own.push_lane(lane, None if lane in empty else make(lane))
        for node, value in own.partials.items():
            stretch = None
            if value is not None:
                stretch = torch.zeros(layout.size_bytes, dtype=torch.uint8)
                write_lane_sum(layout.views(stretch), value)
            partials.append((node, stretch))
    total = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    chunk, tree_reduce.CHUNK_BYTES = tree_reduce.CHUNK_BYTES, 64
    try:
        for start, stop in split_evenly(layout.size_bytes, range(workers)).values():
            cut = [(node, None if there is None else there[start:stop]) for node, there in partials]
            addition = TreeReduce(build_sum_tree(cut, lanes), total[start:stop], layout.regions_within(start, stop))
            for until in sorted(rng.randint(0, stop - start) for _ in range(3)):
                addition.run(until)
            addition.run(stop - start)
    finally:
        tree_reduce.CHUNK_BYTES = chunk
    assert bits(layout.views(total)) == bits(whole.total())


def partition(lanes, workers, rng):
    carried = [[] for _ in range(workers)]
    for lane in range(lanes):
        rng.choice(carried).append(lane)
    return carried


@given(st.integers(1, 64), st.integers(2, 8), st.integers(0, 2**32), st.integers(1, 100_000))
def test_slots_in_shared_memory_do_not_overlap(lanes, workers, seed, elements):
    zero = torch.zeros((), dtype=torch.float64)
    layout = FlatLayout(LaneSum([torch.empty(elements)], [], [], zero))
    carries = dict(enumerate(partition(lanes, workers, random.Random(seed))))
    plan = AllReducePlan.of(carries, lanes, layout)
    for seat, carried in carries.items():
        nodes = partial_nodes(carried, lanes)
        starts = [plan.partial_offset(seat, bank, i) for bank in range(plan.banks) for i in range(len(nodes))]
        ends = [start + layout.size_bytes for start in starts]
        assert starts == [64, *ends][: len(starts)]
        assert plan.reduced_offset(seat) == (ends[-1] if ends else 64)
        assert plan.shared_memory_bytes(seat) >= plan.reduced_offset(seat)
        assert all(start % 64 == 0 for start in starts)
    assert (plan.phases == 1) == (workers == 2 or workers * layout.size_bytes < ONE_PHASE_MAX_BYTES)


def test_lanes_in_too_many_pieces_are_refused():
    zero = torch.zeros((), dtype=torch.float64)
    carries = {0: list(range(0, 600, 2)), 1: list(range(1, 600, 2))}
    with pytest.raises(ValueError, match="separate blocks"):
        AllReducePlan.of(carries, 600, FlatLayout(LaneSum([torch.empty(4)], [], [], zero)))
