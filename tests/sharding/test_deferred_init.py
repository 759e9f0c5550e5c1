"""The first weights, tensor by tensor, are those of a model made at once: bit for bit."""

import numpy as np
import pytest
import torch
from torch import nn

from shoal.sharding.deferred_init import DeferredInit, named_tensors
from tests.sharding.ranks import MODELS


def reinitialised():
    """Default values are drawn and overwritten, views are written to, values come from Python."""
    model = nn.Sequential(nn.Embedding(8, 4, padding_idx=2), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
    with torch.no_grad():
        model[3].weight[1] *= 3
        model[3].weight[:, 0] = torch.randn(3)
    nn.init.orthogonal_(model[1].weight)
    model.register_buffer("scale", torch.tensor([1.5, -2.0]))
    model.register_buffer("mask", torch.tril(torch.ones(4, 4)), persistent=False)
    model[1].gain = nn.Parameter(torch.rand(3) + torch.full((3,), 2.0))
    return model


def copies():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3)


@pytest.mark.parametrize("make", [*MODELS.values(), reinitialised, copies], ids=lambda make: make.__name__)
def test_the_same_bits_and_the_same_draws(make):
    torch.manual_seed(5)
    expected = named_tensors(make())
    after = torch.rand(1)

    torch.manual_seed(5)
    deferred = DeferredInit(make)
    assert all(tensor.is_meta for tensor in named_tensors(deferred.model).values())
    found = {}
    deferred.materialise(lambda name, values: found.setdefault(name, values.clone()))
    assert deferred.why_not_deferred == ""
    assert torch.equal(torch.rand(1), after)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


def test_no_more_than_one_large_tensor_is_there_at_a_time():
    def make():
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))).apply(again)

    def again(module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight)

    alive = []
    order = []

    def take(name, values):
        order.append(name)
        alive.append(values.untyped_storage()._weak_ref())
        if name.endswith("weight"):
            there = [ref for ref in alive[:-1] if not torch.UntypedStorage._expired(ref)]
            assert len(there) <= 1

    DeferredInit(make).materialise(take)
    assert len(order) == 12


class Sensitive(nn.Module):
    """Looks at its own values."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))
        self.large = bool(self.weight.sum() > 0)


class Eager(nn.Module):
    """Draws where nobody can put it off."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, device="cpu"))
        self.other = nn.Linear(4, 4)


@pytest.mark.parametrize("make", [Sensitive, Eager])
def test_a_model_that_needs_values_is_made_in_full(make):
    torch.manual_seed(5)
    expected = named_tensors(make())
    torch.manual_seed(5)
    deferred = DeferredInit(make)
    assert deferred.why_not_deferred
    found = {}
    deferred.materialise(lambda name, values: found.setdefault(name, values.clone()))
    assert all(tensor.is_meta for tensor in named_tensors(deferred.model).values())
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_values_that_were_there_before_are_not_in_the_model():
    """It is cut as if it had none: nobody writes to where they lie, and one that stands twice is one."""
    values = np.arange(12, dtype=np.float32).reshape(3, 4)

    def make():
        model = nn.Sequential(nn.Embedding.from_pretrained(torch.from_numpy(values), freeze=False), nn.Linear(4, 3))
        model[1].weight = model[0].weight
        return model

    deferred = DeferredInit(make)
    assert deferred.model[0].weight is deferred.model[1].weight
    assert deferred.model[0].weight.requires_grad
    deferred.model.to_empty(device="cpu")
    found = {}
    deferred.materialise(lambda name, tensor: found.setdefault(name, tensor.clone()))
    assert found.keys() == {"0.weight", "1.bias"}
    assert torch.equal(found["0.weight"], torch.from_numpy(values))
