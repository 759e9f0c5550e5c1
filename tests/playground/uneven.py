"""A model that is not exact, on purpose."""

import sys

import torch
from torch import nn


class Uneven(nn.Module):
    """From a step on, the gradient of one parameter depends on the worker's seat. The output does not."""

    def __init__(self, after):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.extra = nn.Parameter(torch.ones(3))
        self.after = after
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.seat = int(sys.argv[sys.argv.index("--seat") + 1]) if "--seat" in sys.argv else 0

    def forward(self, x):
        late = False
        if self.training:
            self.seen += 1
            late = int(self.seen) > self.after
        pull = self.extra.sum() * (1 + (self.seat if late else 0))
        return self.layer(x) + (pull - pull.detach()) * torch.arange(10.0)  # a shift of all classes alike does nothing
