"""Shoal's side: the same job, with a watcher that writes the rows."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.recovery.workload import Rows, Workload
from shoal import Batch, Event, Task

seen: list[int] = []
"""The samples that this process has computed since the last step that counted."""


class Told(Task):
    """Its batches bring the number of each sample."""

    def __init__(self, workload: str) -> None:
        self._workload = Workload.from_text(workload)

    def model(self) -> nn.Module:
        return self._workload.model()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, ids = batch.inputs
        seen.extend(ids.tolist())
        return F.cross_entropy(model(images), batch.target)


class Teller:
    """One row per committed step. A worker takes the lowest place that is free, as one that is restarted would."""

    def __init__(self, workload: str) -> None:
        self._workload = Workload.from_text(workload)
        self._rows: Rows | None = None

    def watch(self, event: Event) -> None:
        if event.kind in ("joined", "stopped"):
            seen.clear()  # what did not count
        elif event.kind == "step":
            if self._rows is None:
                self._rows = Rows(self._workload, self._place())
            self._rows.add(event.step - 1, seen)
            seen.clear()

    def _place(self) -> int:
        for place in range(100):
            lock = os.open(Path(self._workload.directory, f"place-{place}"), os.O_WRONLY | os.O_CREAT)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
            else:
                return place  # the lock goes with the process
        raise RuntimeError("no place is free")


def write_job(workload: Workload) -> Path:
    """The job file in the workload's directory, with its data."""
    directory = Path(workload.directory)
    images, labels = workload.images()
    np.savez(directory / "data.npz", x=images.numpy(), ids=np.arange(workload.samples), y=labels.numpy())
    plain: dict[str, Any] = {
        "name": "recovery",
        "seed": workload.seed,
        "task": {"name": "benchmarks.recovery.shoal_job:Told", "args": {"workload": workload.as_text()}},
        "optimizer": {"name": "AdamW", "args": {"lr": 1e-3}},
        "data": {"source": {"kind": "npz", "path": "data.npz", "inputs": ["x", "ids"], "target": "y"}},
        "batch_size": workload.batch_size * workload.workers,
        "epochs": 100_000,
        "workers": workload.workers,
        "watch": [{"name": "benchmarks.recovery.shoal_job:Teller", "args": {"workload": workload.as_text()}}],
        "export": [],
    }
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(plain))
    return path
