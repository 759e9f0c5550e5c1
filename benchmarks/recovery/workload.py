"""The job that every side runs: an MLP on generated images, and the rows from which results are computed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """A step of `batch_size` samples per worker takes about 30 ms if each worker has its own core."""

    directory: str
    workers: int = 3
    batch_size: int = 256
    samples: int = 15_360
    save_every: int = 10
    seed: int = 0

    @classmethod
    def from_text(cls, text: str) -> Workload:
        return cls(**json.loads(text))

    def as_text(self) -> str:
        return json.dumps(asdict(self))

    @property
    def steps_per_epoch(self) -> int:
        return self.samples // (self.workers * self.batch_size)

    @property
    def checkpoint(self) -> Path:
        return Path(self.directory, "checkpoint.pt")

    def images(self) -> tuple[Tensor, Tensor]:
        import torch

        made = torch.Generator().manual_seed(self.seed)
        labels = torch.randint(10, (self.samples,), generator=made)
        return torch.rand(self.samples, 784, generator=made) + labels[:, None] / 10, labels

    def model(self) -> nn.Module:
        import torch

        torch.manual_seed(self.seed)
        layers = torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)
        return torch.nn.Sequential(*layers)


class CommitLog:
    """One line per committed step of one worker. Each line is a single write, so `kill -9` cannot split it."""

    def __init__(self, workload: Workload, worker: int) -> None:
        self.worker = worker
        self._file = os.open(Path(workload.directory, f"rows-{worker}.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def add(self, step: int, sample_ids: Iterable[int]) -> None:
        row = {"t": time.time(), "worker": self.worker, "pid": os.getpid(), "step": step, "sample_ids": [*sample_ids]}
        os.write(self._file, json.dumps(row).encode() + b"\n")


def save_atomically(state: Any, path: Path) -> None:
    """Save atomically. Tutorials write in place, and a worker killed while saving would destroy the checkpoint."""
    import torch

    torch.save(state, path.with_suffix(f".{os.getpid()}"))
    path.with_suffix(f".{os.getpid()}").replace(path)
