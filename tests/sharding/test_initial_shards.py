"""Weights from a file, loaded shard by shard, follow the same rules as those of a whole model."""

import pytest
import torch
from torch import nn

from shoal.errors import ShoalError
from shoal.sharding.build_replica import load_initial_shards
from shoal.sharding.local_state import LocalState
from shoal.spec.job import InitFromConfig
from shoal.tasks.initial_weights import first_names


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embed.weight


def load(weights, **options):
    model = Tied()
    init = InitFromConfig(path="w", **options)
    return model, load_initial_shards(LocalState.unsharded(model), first_names(model), weights, init)


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_any_name_of_a_tied_tensor_completes_it(name):
    model, found = load({name: torch.full((5, 3), 2.0), "head.bias": torch.ones(5)})
    assert (len(found.taken), found.tensors, found.missing) == (2, 2, [])
    assert bool((model.embed.weight == 2).all())
    assert bool((model.head.bias == 1).all())


def test_what_does_not_fit_is_refused_or_told():
    there = {"embed.weight": torch.ones(5, 3), "head.bias": torch.ones(4), "tail": torch.ones(1)}
    with pytest.raises(ShoalError, match=r"'head.bias' is \[4\] in the file .* \(0 missing, 1 left over, 1 of another"):
        load(there)
    _, found = load(there, strict=False)
    assert (found.left_over, list(found.mismatched)) == (["tail"], ["head.bias"])
