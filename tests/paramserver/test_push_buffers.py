"""What is sent from where it lies, and parameters that lie where values came."""

from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.collectives.transport.shared_memory import ByteBuffer
from shoal.lanes.flat_layout import FlatLayout, write_lane_sum
from shoal.lanes.lane_sum import LaneSum
from shoal.lanes.replica import Replica
from shoal.paramserver import push_buffers
from shoal.paramserver.push_buffers import ZeroCopyPush
from shoal.spec.chunk_table import ParameterPiece

SHAPES = st.lists(st.sampled_from([(3,), (40, 30), (7, 90), (2, 3, 50, 4), (0,)]), min_size=1, max_size=6)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])


def sum_of(shapes, dtypes, seed, *, turned):
    torch.manual_seed(seed)
    grads = [torch.randn(shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=False)]
    if turned:
        grads = [grad.transpose(0, -1).contiguous().transpose(0, -1) for grad in grads]
    loss, count = torch.randn(2, dtype=torch.float64)
    return LaneSum(grads, [torch.randn(5)], [torch.arange(3)], loss, count)


@given(SHAPES, st.lists(DTYPES, min_size=6, max_size=6), st.data(), st.booleans(), st.booleans())
def test_the_same_bytes_as_in_a_flat_buffer(shapes, dtypes, data, turned, near):
    layout = FlatLayout(sum_of(shapes, dtypes, 0, turned=False))
    memory = ByteBuffer.private(2 * layout.size_bytes)
    inner = data.draw(st.lists(st.integers(1, layout.size_bytes - 1), max_size=4, unique=True))
    ends = [0, *sorted(inner), layout.size_bytes]
    pieces = [ParameterPiece(i, i, i + 1, a, b, (0,), ()) for i, (a, b) in enumerate(pairwise(ends))]
    with patch.object(push_buffers, "ZERO_COPY_MIN_BYTES", 400):
        partials = ZeroCopyPush(layout, memory, 2)
        for step in range(2):  # nothing of the step before is left
            for index in range(2):
                value = sum_of(shapes, dtypes, 2 * step + index, turned=turned)
                partials.set_partial(index, value)
                expected = ByteBuffer.private(layout.size_bytes)
                write_lane_sum(layout.views(expected.tensor), value)
                if near:
                    for piece in pieces:
                        partials.copy_to_shared_memory(index, piece)
                    start = index * layout.size_bytes
                    found = bytes(memory.raw[start : start + layout.size_bytes])
                else:
                    found = b"".join(bytes(part) for piece in pieces for part in partials.buffers(index, piece))
                assert same(layout, found, expected)


def same(layout, found, expected):
    """But for the gaps between tensors."""
    mine = all_of(layout.views(torch.frombuffer(bytearray(found), dtype=torch.uint8)))
    return all(map(torch.equal, mine, all_of(layout.views(expected.tensor))))


def all_of(value):
    return [*value.grads, *value.float_buffers, *value.int_buffers, value.loss, value.count]


def test_large_gradients_are_not_copied():
    value = LaneSum([torch.randn(300, 300)], [], [], torch.zeros((), dtype=torch.float64), None)
    layout = FlatLayout(value)
    partials = ZeroCopyPush(layout, ByteBuffer.private(layout.size_bytes), 1)
    partials.set_partial(0, value)
    first, *_ = partials.buffers(0, ParameterPiece(0, 0, 1, 0, layout.size_bytes, (0,), ()))
    value.grads[0].zero_()
    assert not any(first)


class Tied(nn.Module):
    """A buffer that is a view of a parameter."""

    def __init__(self, shared):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("seen", self.layer.weight.detach() if shared else self.layer.weight.detach().clone())


@pytest.mark.parametrize("shared", [False, True])
def test_parameters_move_unless_somebody_shares_their_memory(shared):
    model = Tied(shared)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: None, seed=0)
    before = [parameter.detach().clone() for parameter in replica.trainable]
    values = [torch.randn_like(parameter) for parameter in replica.trainable]
    assert replica.adopt_storage(values) is not shared
    for parameter, old, new in zip(replica.trainable, before, values, strict=True):
        assert torch.equal(parameter, old if shared else new)
        assert (parameter.data_ptr() == new.data_ptr()) is not shared
    if shared:
        replica.copy_values(values)
        assert torch.equal(model.seen, values[0])
