"""A network for a table of numbers."""

from torch import nn


class Net(nn.Sequential):
    """The first layer learns each column's mean and scale from the training part alone: nothing leaks."""

    def __init__(self, columns, hidden=32):
        super().__init__(
            nn.BatchNorm1d(columns, affine=False),
            nn.Linear(columns, hidden),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(hidden, 1),
        )
