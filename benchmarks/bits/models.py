"""Small models as a user would write them, and watchers that kill. Copied beside the job files of this benchmark."""

import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from shoal import Batch, SparseTable


def mlp(inputs=64, classes=10, hidden=32, depth=2):
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
    by = torch.randint(-1, 2, (2,), generator=generator).tolist()
    return Batch((batch.inputs[0].roll(by, dims=(2, 3)),), batch.target, batch.size)


class GPT(nn.Module):
    def __init__(self, vocabulary=30, width=24, heads=2, layers=2, context=16):
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


class Words(nn.Module):
    """Digits as words: each pixel's value is a row of a sparse table."""

    def __init__(self, rows=100_000, dim=8):
        super().__init__()
        self.words = SparseTable(rows, dim, optimizer="rowwise_adagrad", lr=0.1)
        self.norm = nn.BatchNorm1d(dim)
        self.out = nn.Linear(dim, 10)

    def forward(self, pixels):
        at = torch.arange(64) * 17 + pixels.round().long()
        words = self.words(at * 7919 % self.words.spec.rows).mean(1)
        return self.out(F.dropout(self.norm(words), 0.1, self.training))


class KillAt:
    """`kill -9` of the worker's own process at each of these steps: each once where there is a directory for marks,
    or of every worker that comes to it."""

    def __init__(self, steps, marks=""):
        self.steps = steps
        self.marks = marks

    def watch(self, event):
        if event.kind == "step" and event.step in self.steps and self._first(event.step):
            os.kill(os.getpid(), signal.SIGKILL)

    def _first(self, step):
        if not self.marks:
            return True
        try:
            Path(self.marks, f"killed-{step}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
