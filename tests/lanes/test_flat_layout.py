"""How a sum lies in a stretch, where that is cut, and how it is told to others."""

import json

import pytest
import torch

from shoal.lanes.flat_layout import FlatLayout
from tests.collectives.worker_processes import lane_sum
from tests.paramserver.chunked_model import small_chunks

SIZES = [(33, 70), (2570,), (), (0, 3), (1,)]


@pytest.fixture
def layout():
    with small_chunks():
        made = FlatLayout(lane_sum(0, 0, SIZES))
        assert len(made.chunk_offsets) > 5
    return made


def test_gradients_lie_first_whatever_their_dtype(layout):
    assert max(place.start + place.size_bytes for place in layout.grads) <= layout.tail
    assert len({place.dtype for place in layout.grads}) > 1
    assert layout.chunk_offsets[-2:] == [layout.tail, layout.size_bytes]


def test_slices_are_all_gradients_each_element_once(layout):
    stretch = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    for it in layout.slices:
        assert layout.chunk_offsets[it.chunk] <= it.start < it.stop <= layout.chunk_offsets[it.chunk + 1]
        stretch[it.start : it.stop].view(it.dtype).add_(1)
    sums = layout.views(stretch)
    assert all(bool((grad == 1).all()) for grad in sums.grads)
    assert not any(tensor.any() for tensor in (*sums.float_buffers, sums.loss, sums.count))
    assert layout.slices == sorted(layout.slices, key=lambda it: it.start)


def test_slices_of_gradients_are_those_of_the_flat_buffer(layout):
    """Whatever strides the gradients have."""
    stretch = torch.zeros(layout.size_bytes, dtype=torch.uint8)
    sums, value = layout.views(stretch), lane_sum(0, 0, SIZES)
    for place, grad in zip(sums.grads, value.grads, strict=True):
        place.copy_(grad)
    expected = [stretch[it.start : it.stop].view(it.dtype) for it in layout.slices]
    odd = [grad.t().contiguous().t() if grad.dim() == 2 else grad.contiguous() for grad in value.grads]
    for grads in (sums.grads, value.grads, odd):
        found = layout.slices_of(grads)
        assert len(found) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [it.data_ptr() for it in layout.slices_of(sums.grads)] == [it.data_ptr() for it in expected]


def test_a_layout_can_be_serialised(layout):
    with small_chunks():
        heard = FlatLayout.from_description(json.loads(json.dumps(layout.describe())))
        assert heard.chunk_offsets == layout.chunk_offsets
    assert (heard.digest, heard.size_bytes, heard.regions) == (layout.digest, layout.size_bytes, layout.regions)
    assert heard.slices == layout.slices
    sums = heard.views(torch.zeros(heard.size_bytes, dtype=torch.uint8))
    assert layout.fits(sums)


def _spoilt(layout):
    def changed(path, value):
        told = json.loads(json.dumps(layout.describe()))
        there = told
        for key in path[:-1]:
            there = there[key]
        there[path[-1]] = value
        return told

    yield from (None, [], {}, {"tensors": [], "sizes": [0, 0, 0]}, "text")
    first = ["tensors", 0]
    for path, value in (
        ([*first, 0], "F31"),
        ([*first, 0], ["F32"]),
        ([*first, 1], [33, -70]),
        ([*first, 1], [33, 70.0]),
        ([*first, 1], [33, True]),
        ([*first, 1], [1 << 40, 1 << 40]),
        ([*first, 1], [33]),
        ([*first, 1], [0, 1 << 45]),
        ([*first, 2], [70, 2]),
        ([*first, 2], [1, 1]),
        ([*first, 2], [0, 0]),
        (["sizes"], [1, 2]),
        (["sizes"], [-1, 9, 2]),
        (["sizes", 0], 10**9),
        (["sizes", 0], 1),
        (["tensors", len(layout.describe()["tensors"]) - 3, 0], "F32"),
        (["tensors"], 7),
        (["tensors", 0], None),
    ):
        yield changed(path, value)


def test_nonsense_is_no_layout(layout):
    for told in _spoilt(layout):
        with pytest.raises(ValueError, match="layout of a model"):
            FlatLayout.from_description(told)
