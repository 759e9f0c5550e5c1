"""A model with a given number of parameters that is never run: only the bytes that it would send matter."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.server.setting import Setting
from shoal.lanes.lane_sum import LaneSum
from shoal.lanes.replica import Replica

LAYERS = 10


class Weights(nn.Module):
    def __init__(self, floats: int) -> None:
        super().__init__()
        sizes = [floats // LAYERS] * (LAYERS - 1) + [floats - floats // LAYERS * (LAYERS - 1)]
        self.layers = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in sizes])


def replica(setting: Setting) -> Replica:
    """The model with the default optimizer of Shoal's jobs: fused."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Weights(setting.floats)
    kind = getattr(torch.optim, setting.optimizer)
    return Replica(model, kind(model.parameters(), lr=1e-4, fused=True), _no_loss, seed=0)


def lane_sum(replica: Replica) -> LaneSum:
    grads = [torch.randn_like(parameter) for parameter in replica.trainable]
    return LaneSum(grads, [], [], torch.tensor(1.0, dtype=torch.float64))


def _no_loss(model: nn.Module, batch: object) -> Tensor:
    raise NotImplementedError
