"""A worker's way through views."""

import copy
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn

from shoal.strategies.local_sgd.outer_optimizer import OuterOptimizer
from shoal.strategies.local_sgd.replica import LocalReplica
from shoal.train.elastic import ElasticLoop


def test_who_leaves_while_it_follows_saves_the_last_commit():
    """Fragments that came since belong to a period that may never count."""
    model = nn.Linear(2, 2)
    replica = LocalReplica(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, x: model(x).mean(),
        seed=0,
        outer=partial(OuterOptimizer, momentum=0.5),
        next_sync=lambda step: step + 8,
    )
    before, saved = copy.deepcopy(replica.state()), []
    loop = SimpleNamespace(replica=replica, leave=lambda why: saved.append(copy.deepcopy(replica.state())))
    elastic = ElasticLoop(loop, SimpleNamespace(), seat=1, save_lock=None)
    elastic._catch_up_stream._stream = SimpleNamespace(close=lambda: None)
    replica.apply_fragment([0], [torch.ones(2, 2)])
    elastic._leave("asked to leave")
    assert torch.equal(saved[0]["outer"]["velocity"][0], before["outer"]["velocity"][0])
    assert torch.equal(saved[0]["model"]["weight"], before["model"]["weight"])
