"""Whether modules use their parameters themselves: a run of a copy that has no memory tells."""

import pytest
import torch
from torch import nn

from shoal.sharding.deferred_init import DeferredInit
from shoal.sharding.fsdp import fsdp_units
from shoal.sharding.param_usage import externally_used_modules
from tests.sharding.ranks import MODELS, batch, loss


def outside(make, name="gpt"):
    model = DeferredInit(make).model
    return model, externally_used_modules(model, lambda trial: loss(trial, batch(name, 0, 0)))


def test_what_other_code_uses():
    model, found = outside(MODELS["loose"])
    assert found == {"tokens", "places", "more"}
    assert fsdp_units(model, found) == ["blocks.0", "blocks.1"]
    assert fsdp_units(model) == ["blocks.0", "blocks.1", "tokens", "places"]  # nobody calls a list


@pytest.mark.parametrize("name", ["gpt", "tied", "encoder", "mlp", "batch_normed"])
def test_most_models_can_be_gathered_block_by_block(name):
    """torch's attention uses a layer in it without calling that; but it is in a block that is called."""
    model, found = outside(MODELS[name], name)
    assert fsdp_units(model)
    assert fsdp_units(model, found) == fsdp_units(model)


def test_a_large_layer_that_only_its_own_code_uses_is_gathered_by_itself():
    def make():
        return nn.Sequential(nn.Embedding(2048, 32), nn.Linear(32, 34), nn.Flatten())

    model, found = outside(make)
    assert fsdp_units(model, found) == ["0"]


class Remembers(nn.Module):
    """Computes something at its first call, and uses it ever after."""

    def __init__(self):
        super().__init__()
        self.layer, self.table = nn.Linear(12, 34), None

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(12.0)
        return self.layer(x * self.table)


def test_the_model_itself_is_left_alone():
    model, found = outside(Remembers, "mlp")
    assert (found, model.table) == (set(), None)
    assert not model._forward_pre_hooks


class Looks(nn.Module):
    """At values, after it has used a parameter from outside."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 34)

    def forward(self, x):
        x = x @ self.layer.weight.T
        return x if bool(x.sum() > 0) else -x


def test_a_model_that_needs_values_shows_what_it_did_before():
    assert outside(Looks, "mlp")[1] == {"layer"}
