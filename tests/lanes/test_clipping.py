"""Clipping by the norms of slices: torch's bits where torch computes the same, and one answer however sums lie."""

import copy

import pytest
import torch
from torch import nn

from shoal.lanes.clipping import Clipping, clip_coefficient, scale_gradients, slice_norms
from shoal.lanes.lane_sum import LaneSum
from shoal.lanes.replica import Replica
from tests.paramserver.chunked_model import small_chunks


def gradients(dtype=torch.float32):
    chance = torch.Generator().manual_seed(0)
    found = [torch.randn(size, generator=chance).to(dtype) for size in [(7, 19), (501,), (), (33, 3, 3, 3), (1,)]]
    found[3] = found[3].to(memory_format=torch.channels_last)
    return found


def replica_of(grads, clipping):
    model = nn.ParameterList([torch.zeros_like(grad) for grad in grads])
    return Replica(model, torch.optim.SGD(model.parameters(), lr=1.0), lambda m, b: 0, seed=0, clipping=clipping)


def applied(grads, clipping, *, count=None):
    """What a replica makes of a sum."""
    replica = replica_of(grads, clipping)
    replica.layout.slices  # noqa: B018
    kept = [grad.clone() for grad in grads]
    replica.apply(0, LaneSum(kept, [], [], torch.tensor(0.0, dtype=torch.float64), count))
    return kept


@pytest.mark.parametrize("norm", [0.1, 3.7, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_where_each_tensor_is_one_slice_it_is_what_torch_does(norm, dtype):
    parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in gradients(dtype)]
    for parameter, grad in zip(parameters, gradients(dtype), strict=True):
        parameter.grad = grad
    nn.utils.clip_grad_norm_(parameters, norm)
    for mine, parameter in zip(applied(gradients(dtype), Clipping(norm=norm)), parameters, strict=True):
        assert torch.equal(mine, parameter.grad)


def test_values():
    parameters = [nn.Parameter(torch.zeros_like(grad)) for grad in gradients()]
    for parameter, grad in zip(parameters, gradients(), strict=True):
        parameter.grad = grad
    nn.utils.clip_grad_value_(parameters, 0.3)
    for mine, parameter in zip(applied(gradients(), Clipping(value=0.3)), parameters, strict=True):
        assert torch.equal(mine, parameter.grad)


@pytest.mark.parametrize("count", [None, 41.7])
def test_the_result_has_the_norm_that_was_asked_for(count):
    grads = [torch.randn(301, 203), torch.randn(17)]
    with small_chunks():
        made = applied(grads, Clipping(norm=0.5), count=None if count is None else torch.tensor(count).double())
    assert torch.cat([grad.flatten() for grad in made]).norm().item() == pytest.approx(0.5, rel=1e-5)
    divided = [grad / count if count else grad for grad in grads]
    with small_chunks():
        large = applied(grads, Clipping(norm=1e6), count=None if count is None else torch.tensor(count).double())
    for mine, grad in zip(large, divided, strict=True):
        torch.testing.assert_close(mine, grad)


def test_norms_that_travelled_as_numbers_give_the_same():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        grads = gradients(dtype)
        with small_chunks():
            layout = replica_of(grads, None).layout
            norms = slice_norms(layout.slices_of(grads))
        told = [norm.item() for norm in norms]
        by = clip_coefficient(norms, clip=0.5)
        assert torch.equal(clip_coefficient(told, clip=0.5, dtype=layout.norm_dtype), by)
        one, other = copy.deepcopy(grads), copy.deepcopy(grads)
        scale_gradients(one, count=None, coefficient=by)
        scale_gradients(other, count=None, coefficient=torch.tensor(by.item(), dtype=torch.float64))
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_sum_that_is_not_finite_stays_so():
    grads = [torch.tensor([1.0, float("inf")]), torch.tensor([2.0])]
    assert not any(grad.isfinite().all() for grad in applied(grads, Clipping(norm=1.0))[:1])
