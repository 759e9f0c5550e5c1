"""A small model whose lanes sleep instead of computing, so that an hour of training leaves the processor free."""

import os
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal import Batch, Task

PAUSE_S = float(os.environ.get("SOAK_PAUSE_S", "0"))


class SleepingTask(Task):  # type: ignore[misc]
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if PAUSE_S and torch.is_grad_enabled():
            time.sleep(PAUSE_S)
        return F.cross_entropy(model(*batch.inputs), batch.target)
