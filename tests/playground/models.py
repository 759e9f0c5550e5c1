"""Small models for the tests, as a user would write them."""

import os
import random
import signal
from pathlib import Path

import numpy as np
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F

from shoal import Batch, Task


def mlp(inputs, classes, hidden=32, depth=0):
    more = [layer for _ in range(depth) for layer in (nn.Linear(hidden, hidden), nn.ReLU())]
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Dropout(0.3), *more, nn.Linear(hidden, classes))


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 10),
    )  # fmt: skip


def as_image(batch):
    return Batch((batch.inputs[0].reshape(-1, 1, 8, 8),), batch.target, batch.size)


def shift(batch, generator):
    """Moves each image by up to one pixel."""
    by = torch.randint(-1, 2, (2,), generator=generator).tolist()
    noise = torch.rand(batch.inputs[0].shape, generator=generator) * 0.05
    return Batch((batch.inputs[0].roll(by, dims=(2, 3)) + noise,), batch.target, batch.size)


class GPT(nn.Module):
    def __init__(self, vocabulary, width=24, heads=2, layers=2, context=16):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        layer = [nn.TransformerEncoderLayer(width, heads, 2 * width, 0.1, batch_first=True) for _ in range(layers)]
        self.layers = nn.ModuleList(layer)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, x):
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for layer in self.layers:
            h = layer(h, src_mask=self.mask[: x.shape[1], : x.shape[1]], is_causal=True)
        return self.head(h)


class TokenTask(Task):
    """A loss whose divisor is not the number of samples."""

    def model(self):
        return nn.Linear(64, 10)

    def loss(self, model, batch):
        weight = 1.0 + batch.target.double()
        losses = F.cross_entropy(model(*batch.inputs), batch.target, reduction="none")
        return (losses * weight).sum(), weight.sum()


class Decays(Task):
    """An optimizer of its own: matrices decay, what has one dimension does not, and the last layer is fast."""

    def model(self):
        return mlp(64, 10, depth=2)

    def loss(self, model, batch):
        return F.cross_entropy(model(*batch.inputs), batch.target)

    def optimizer(self, model):
        rest = list(model[:-1].parameters())
        groups = [
            {"params": model[-1].parameters(), "lr": 0.1},
            {"params": [p for p in rest if p.dim() == 1]},
            {"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.01},
        ]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


class Trusts(torch.optim.SGD):
    """Looks at whole tensors."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad * p.norm() / p.grad.norm()


class Whole(Decays):
    def optimizer(self, model):
        return Trusts(model.parameters(), lr=0.05)


class Keeps(Decays):
    """Has one model for all time: from the beginning, or from when it is first asked for."""

    def __init__(self, late=False):
        self.net = None if late else super().model()

    def model(self):
        self.net = self.net or super().model()
        return self.net


class Conditional(nn.Module):
    """One of its parameters is never touched."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(64, 10)
        self.spare = nn.Linear(64, 10)

    def forward(self, x):
        return self.used(x)


class Sinks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        return self.layer(x) * float("nan")


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(63, 10)

    def forward(self, x):
        return self.layer(x)


class Drifts(nn.Module):
    """A buffer that every forward pass moves, and that the state dict leaves out."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.register_buffer("mean", torch.zeros(64), persistent=False)

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
        return self.layer(x - self.mean)


class Undefined(torchmetrics.Metric):
    """As a correlation of one sample is."""

    def __init__(self):
        super().__init__()
        self.add_state("seen", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, prediction, target):
        self.seen += 1

    def compute(self):
        return self.seen * float("nan")


class Fatal(Undefined):
    """Ends its process when it is worker 0, once: all others know then what was measured."""

    def __init__(self, marks):
        super().__init__()
        self.mark = Path(marks) / "measured"

    def compute(self):
        if "worker-0" in os.readlink("/proc/self/fd/1") and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.seen


class Steps:
    """Remembers which steps it saw."""

    def __init__(self, path):
        self.path = path

    def watch(self, event):
        if event.kind == "step":
            with open(self.path, "a") as file:
                file.write(f"{event.step} {event['loss']}\n")


class Clumsy:
    def watch(self, event):
        if event.kind == "step":
            raise KeyError("oops")


class StopAt:
    def __init__(self, step):
        self.step = step

    def watch(self, event):
        return "enough" if event.kind == "step" and event.step >= self.step else None


def norm1d():
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10))


def own_loss(output, target):
    """As people write it for a language model: classes last, flattened by hand."""
    assert output.shape[:-1] == target.shape
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class Dice(nn.Module):
    """Draws from Python's and numpy's generators, now and then."""

    def __init__(self, every=1):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.every = every
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.training and float(x[0].sum()) % self.every < 1:
            x = x * (1 + 0.1 * random.random()) + 0.1 * np.random.standard_normal()
        return self.layer(x)


class Counting(Task):
    """Remembers how many samples its loss has seen, and lets that change the loss."""

    def __init__(self):
        self.seen = torch.zeros(())

    def model(self):
        return nn.Linear(64, 10)

    def loss(self, model, batch):
        self.seen = self.seen + batch.size
        return F.cross_entropy(model(*batch.inputs), batch.target) * (1 + self.seen / 1000)

    def state(self):
        return {"seen": self.seen}

    def load_state(self, state):
        self.seen = state["seen"]


class Tally(Task):
    """Its weights count how often each sample was seen, and add up the samples' numbers: all integers, so exactly."""

    def __init__(self, samples):
        self.samples = samples

    def model(self):
        seen = nn.Module()
        seen.times = nn.Parameter(torch.zeros(self.samples, dtype=torch.float64))
        seen.total = nn.Parameter(torch.zeros((), dtype=torch.float64))
        return seen

    def loss(self, model, batch):
        """The sum's gradient is -1 for each time and minus the number for the total; the step's divisor is the batch
        size, and so is the learning rate."""
        numbers = batch.inputs[0][:, 0].long()
        return -(model.times[numbers].sum() + model.total * numbers.sum()), torch.tensor(float(batch.size))
