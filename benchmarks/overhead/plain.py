"""Plain PyTorch: the loops that people write by hand, in a process like a worker's.

`loader` is the usual one, a DataLoader over a TensorDataset. `tensors` is the fastest that we know how to write:
everything in memory as the model takes it, a random permutation, one index_select per batch.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.overhead.models import timed
from benchmarks.overhead.samples import IMAGES, LABELS, TEXT, read_idx

Pair = tuple[Tensor, Tensor]


def main() -> None:
    asked = json.loads(sys.argv[-1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs, targets = arrays(Path(asked["data"]), asked["model"])
    batches = (from_loader if asked["loop"] == "loader" else from_tensors)(inputs, targets, asked["batch_size"])
    model = timed(asked["model"], **asked["window"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=asked["fused"] or None)
    train(model, optimizer, batches, steps=asked["steps"])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Pair], *, steps: int) -> None:
    criterion = nn.CrossEntropyLoss()
    for x, y in itertools.islice(batches, steps):
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def from_loader(inputs: Tensor, targets: Tensor, batch_size: int) -> Iterator[Pair]:
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=batch_size, shuffle=True)
    while True:
        yield from loader


def from_tensors(inputs: Tensor, targets: Tensor, batch_size: int) -> Iterator[Pair]:
    while True:
        for ids in torch.split(torch.randperm(len(inputs)), batch_size):
            yield inputs.index_select(0, ids), targets.index_select(0, ids)


def arrays(data: Path, model: str) -> Pair:
    if model == "gpt":
        letters = np.frombuffer((data / TEXT).read_bytes(), np.uint8)
        tokens = torch.from_numpy(np.unique(letters, return_inverse=True)[1])
        windows = tokens.unfold(0, 65, 1)
        return windows[:, :-1], windows[:, 1:]
    images = torch.from_numpy(read_idx(data / IMAGES).copy())[:, None].float() / 255
    return images, torch.from_numpy(read_idx(data / LABELS).astype(np.int64))
