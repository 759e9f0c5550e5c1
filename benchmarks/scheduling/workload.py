"""Workloads: the jobs of a CSV file, made for a policy."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path

from benchmarks.scheduling.application import MOST_GPUS, Application, read_csv
from benchmarks.scheduling.job import SimulatedJob, StepTimes
from shoal.plan.queueing.entry import MAX_PRIORITY


class WorkloadError(Exception):
    """A file that is no workload. The message names the file and the line."""


def load_workload(
    path: Path, apps: Mapping[str, Application], *, adaptive: bool, warm: bool, load: float = 1.0
) -> list[SimulatedJob]:
    """`adaptive` jobs choose their GPUs and their batch, so those that the file asks for may be missing; `min_workers`
    and `max_workers` bound the GPUs. `warm` ones begin with the step times of earlier jobs of the application.

    `load` 2 lets the same jobs arrive in half the time. WorkloadError if the file has no jobs, or a malformed one.
    """
    try:
        rows = read_csv(path)
    except (OSError, UnicodeDecodeError, csv.Error) as failure:
        raise WorkloadError(f"{path}: {failure}") from failure
    if not rows:
        raise WorkloadError(f"{path} has no jobs: it needs a header (name,time,application,…) and a row for each job")
    jobs: dict[str, SimulatedJob] = {}
    for number, row in enumerate(rows, start=2):
        try:
            job = _job(row, apps, adaptive=adaptive, warm=warm, load=load)
            if job.name in jobs:
                raise ValueError(f"there are two jobs '{job.name}'")
        except ValueError as failure:
            raise WorkloadError(f"{path}, line {number}: {failure}") from failure
        jobs[job.name] = job
    return list(jobs.values())


def _job(
    row: Mapping[str, str], apps: Mapping[str, Application], *, adaptive: bool, warm: bool, load: float
) -> SimulatedJob:
    name, kind = _text(row, "name"), _text(row, "application")
    if kind not in apps:
        raise ValueError(f"there is no application '{kind}'; the profiles have {', '.join(sorted(apps))}")
    app = apps[kind]
    asked = _number(row, "batch_size", least=1, missing=app.init_batch if adaptive else None)
    min_workers = max(_number(row, "min_workers", least=0, most=app.most_gpus, missing=0), 1)
    return SimulatedJob(
        name=name,
        app=app,
        submitted_s=round(_number(row, "time", least=0) / load),
        gpus_asked=_number(row, "num_replicas", least=1, most=MOST_GPUS, missing=1 if adaptive else None),
        batch_asked=asked,
        batch=app.fixed_batch if adaptive else asked,
        min_workers=min_workers,
        max_workers=_number(row, "max_workers", least=min_workers, most=MOST_GPUS, missing=MOST_GPUS),
        tenant=(row.get("tenant") or "").strip(),
        priority=_number(row, "priority", least=-MAX_PRIORITY, most=MAX_PRIORITY, missing=0),
        times=StepTimes(prior=app.compact_points if warm else None),
        gradients=app.gradients(app.init_batch, 0) if warm else None,
    )


def _text(row: Mapping[str, str], field: str) -> str:
    if not (found := (row.get(field) or "").strip()):
        raise ValueError(f"`{field}` is missing")
    return found


def _number(
    row: Mapping[str, str], field: str, *, least: int, most: float = math.inf, missing: int | None = None
) -> int:
    if missing is not None and not (row.get(field) or "").strip():
        return missing
    text = _text(row, field)
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not (least <= found <= most and found < math.inf):
        most_said = f" to {most:g}" if most < math.inf else " or more"
        raise ValueError(f"`{field}` is '{text}', not a number of {least}{most_said}")
    return round(found)
