"""Digits as words: each pixel's value is a row of a sparse table."""

import torch
from torch import nn
from torch.nn import functional as F

from shoal import SparseTable, Task


class Words(nn.Module):
    def __init__(self, rows=10_000_000, dim=8, optimizer="rowwise_adagrad", lr=0.1):
        super().__init__()
        self.words = SparseTable(rows, dim, optimizer=optimizer, lr=lr)
        self.pairs = SparseTable(1000, 5, optimizer="adagrad", lr=lr)
        self.norm = nn.BatchNorm1d(dim + 5)
        self.out = nn.Linear(dim + 5, 10)

    def forward(self, pixels):
        at = torch.arange(64) * 17 + pixels.round().long()
        words = self.words(at * 7919 % self.words.spec.rows).mean(1)
        pairs = self.pairs(at[:, ::2] % 1000).sum(1) + self.pairs(at[:, :3] % 1000).sum(1)
        return self.out(F.dropout(self.norm(torch.cat([words, pairs], 1)), 0.1, self.training))


class Summed(Task):
    """The loss has a divisor of its own."""

    def model(self):
        return Words(dim=4, optimizer="sgd", lr=2.0)

    def loss(self, model, batch):
        return F.cross_entropy(model(*batch.inputs), batch.target, reduction="sum"), int(batch.target.sum()) + 1
