"""What a loss may return, and what it may not."""

import math

import pytest
import torch
from torch import nn

from shoal.errors import ShoalError
from shoal.lanes.clipping import divisor_of, scale_gradients
from shoal.lanes.loss import split_loss
from shoal.lanes.replica import LaneSum, Replica, add


def value(*shape):
    return torch.ones(shape, requires_grad=True) * 2


def test_a_mean_has_no_weight():
    mean = value()
    assert split_loss(mean) == (mean, None)


@pytest.mark.parametrize("weight", [3, 3.0, torch.tensor(3), torch.tensor([3.0]), torch.tensor(3.0).half()])
def test_a_pair_has_its_weight_as_float64(weight):
    found, count = split_loss((value(), weight))
    assert (float(found), float(count), count.dtype, count.shape) == (2, 3, torch.float64, ())


def test_one_number_in_a_list_is_one_number():
    mean, _ = split_loss(value(1))
    assert mean.shape == ()


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (value(4), r"returns float32 \[4\], not one number"),
        (2.0, "an object of type float, not one number"),
        (None, "an object of type NoneType, not one number"),
        (torch.tensor(2), r"returns int64 \[\], not one number"),
        (torch.tensor(2.0), "does not depend on a parameter"),
        ((value(), value(), value()), "returns 3 values"),
        ((value(4), 4), r"returns float32 \[4\], not one number"),
        ((value(), value()), "the weight of the loss depends on the model"),
        ((value(), torch.ones(4)), r"returns float32 \[4\] as its weight"),
        ((value(), "4"), "an object of type str as its weight"),
        ((value(), -1), r"returns -1\.0 as its weight"),
        ((value(), math.nan), "returns nan as its weight"),
        ((value(), torch.tensor(math.inf)), "returns inf as its weight"),
    ],
)
def test_anything_else_is_refused_as_a_mistake_of_the_loss(result, words):
    with pytest.raises(ShoalError, match=words) as caught:
        split_loss(result)
    assert (caught.value.code, caught.value.where) == ("SH402", "loss")
    assert caught.value.fix


def test_a_forward_pass_without_gradients_needs_none():
    with torch.no_grad():
        assert split_loss(torch.tensor(2.0))[1] is None


def test_lanes_with_and_without_a_weight_have_no_sum():
    weighted, plain = LaneSum([], [], [], torch.ones(()), torch.ones(())), LaneSum([], [], [], torch.ones(()))
    for left, right in ((weighted, plain), (plain, weighted)):
        with pytest.raises(ShoalError, match="for some lanes of a step") as caught:
            add(left, right)
        assert caught.value.code == "SH422"


# ---- divisors ----


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_sum_is_divided_by_its_count_in_any_dtype(dtype):
    """100,000 is no number of float16, and 257 none of bfloat16."""
    for count in (257.0, 100_000.0, 3.0):
        grads = [torch.full((5,), 30_000.0).to(dtype), torch.tensor(30_000.0).to(dtype)]
        exact = grads[0].double() / count
        scale_gradients(grads, count=divisor_of(count, dtype))
        assert [grad.dtype for grad in grads] == [dtype, dtype]
        torch.testing.assert_close(grads[0].double(), exact, rtol=torch.finfo(dtype).eps, atol=0)
        assert torch.equal(grads[0][0], grads[1])


def test_a_count_of_zero_divides_by_one():
    assert float(divisor_of(0.0, torch.float16)) == 1
    assert float(divisor_of(torch.tensor(1e-9, dtype=torch.float64))) == 1e-9


# ---- sparse gradients ----


class Functional(nn.Module):
    """Its gradient turns out to be sparse in the backward pass only."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.inner.rows = nn.Parameter(torch.ones(4, 2))

    def forward(self, ids):
        return nn.functional.embedding(ids, self.inner.rows, sparse=True)


class Sink:
    def accept(self, index, grad):
        pass

    def invalidate(self, why):
        pass


@pytest.mark.parametrize("sink", [None, Sink()])
def test_a_gradient_that_turns_out_to_be_sparse_is_named(sink):
    model = Functional()
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, ids: m(ids).sum(), seed=0)
    with pytest.raises(ShoalError, match=r"backward gave 'inner\.rows' a sparse gradient") as caught:
        replica.forward_backward(0, 0, torch.tensor([1, 2]), share=1.0, sink=sink)
    assert caught.value.code == "SH420"
    assert "SparseTable" in caught.value.fix
