"""A plain PyTorch model; nothing in it knows of Shoal."""

from torch import nn


class Net(nn.Sequential):
    def __init__(self, hidden=256):
        super().__init__(
            nn.Linear(64, hidden),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(hidden, 10),
        )
