"""A small model whose lanes sleep instead of computing, so that an hour of training leaves the processor free."""

import os
import time

import torch
from sklearn.datasets import load_digits
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


class NoisyDigits(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Samples with random noise, which loader processes make: one that is started again must draw the same numbers."""

    def __init__(self) -> None:
        pixels, digits = load_digits(return_X_y=True)
        self._pixels = torch.tensor(pixels, dtype=torch.float32) / 16
        self.targets = digits.tolist()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self._pixels[i] + 0.1 * torch.rand(64), self.targets[i]
