"""Workloads: the jobs of a CSV file, made for a policy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.scheduling.application import Application, read_csv
from benchmarks.scheduling.job import SimulatedJob, StepTimes


def load_workload(
    path: Path, apps: Mapping[str, Application], *, adaptive: bool, warm: bool, load: float = 1.0
) -> list[SimulatedJob]:
    """`adaptive` jobs choose their batch. `warm` ones begin with the step times of earlier jobs of the application.

    `load` 2 lets the same jobs arrive in half the time.
    """
    rows = [row | {"time": str(round(int(row["time"]) / load))} for row in read_csv(path)]
    return [_job(row, apps[row["application"]], adaptive, warm) for row in rows]


def _job(row: dict[str, str], app: Application, adaptive: bool, warm: bool) -> SimulatedJob:
    asked = int(row["batch_size"])
    return SimulatedJob(
        name=row["name"],
        app=app,
        submitted_s=int(row["time"]),
        gpus_asked=int(row["num_replicas"]),
        batch_asked=asked,
        batch=app.fixed_batch if adaptive else asked,
        times=StepTimes(prior=app.compact_points if warm else None),
        gradients=app.gradients(app.init_batch, 0) if warm else None,
    )
