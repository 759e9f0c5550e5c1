"""Shoal's side: the same job, with a watcher that writes the rows."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from torch import nn

from benchmarks.recovery.workload import CommitLog, Workload
from shoal import Event
from shoal.data.datasets import open_datasets
from shoal.data.samplers import LaneSampler, make_sampler
from shoal.spec.job import Job
from shoal.spec.load import load_job


def model(workload: str) -> nn.Module:
    return Workload.from_text(workload).model()


class CommitLogger:
    """One row per committed step, with the samples that the sampler gives to all lanes of that step.

    A committed step belongs to all workers: its row lists all samples of the step, even if a worker that computed a
    part was killed before it could write a row. The final weights prove that they contain it. A worker takes the lowest
    free slot, as a restarted worker would.
    """

    def __init__(self, workload: str) -> None:
        self._workload = Workload.from_text(workload)
        self._sampler = make_job_sampler(load_job(job_file(self._workload), check_names=False))
        self._rows: CommitLog | None = None

    def watch(self, event: Event) -> None:
        if event.kind == "step" and event.step is not None:
            if self._rows is None:
                self._rows = CommitLog(self._workload, self._free_slot())
            self._rows.add(event.step - 1, step_ids(self._sampler, event.step - 1))

    def _free_slot(self) -> int:
        for place in range(100):
            lock = os.open(Path(self._workload.directory, f"place-{place}"), os.O_WRONLY | os.O_CREAT)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
            else:
                return place  # the lock goes with the process
        raise RuntimeError("no place is free")


def make_job_sampler(job: Job) -> LaneSampler:
    """The sampler of the job, made as a worker makes it."""
    data = open_datasets(job.data, seed=job.seed, base_dir=job.base_dir, cache_dir=Path(job.base_dir, "cache"))
    return make_sampler(
        job.data.sampler,
        ids=data.train.ids,
        lanes=job.lane_count,
        batch_size=job.batch_size,
        seed=job.seed,
        drop_last=job.drop_last,
        source=data.train.source,
    )


def step_ids(sampler: LaneSampler, step: int) -> list[int]:
    """The samples of a step, over all lanes."""
    return [int(sample) for lane in range(sampler.lanes) for sample in sampler.ids(step, lane)]


def job_file(workload: Workload) -> Path:
    return Path(workload.directory, "job.yaml")


def write_job(workload: Workload) -> Path:
    """The job file in the workload's directory, with its data."""
    images, labels = workload.images()
    np.savez(Path(workload.directory, "data.npz"), x=images.numpy(), y=labels.numpy())
    itself = {"workload": workload.as_text()}
    plain: dict[str, Any] = {
        "name": "recovery",
        "seed": workload.seed,
        "model": {"name": "benchmarks.recovery.shoal_job:model", "args": itself},
        "loss": "CrossEntropyLoss",
        "optimizer": {"name": "AdamW", "args": {"lr": 1e-3}},
        "data": {"source": {"kind": "npz", "path": "data.npz", "inputs": ["x"], "target": "y"}},
        "batch_size": workload.batch_size * workload.workers,
        "steps": 10**8,
        "workers": workload.workers,
        "lanes": workload.workers,
        "watchers": [{"name": "benchmarks.recovery.shoal_job:CommitLogger", "args": itself}],
        "export": [],
    }
    path = job_file(workload)
    path.write_text(yaml.safe_dump(plain))
    return path
