"""Is this simulator the published one? Golden points of the profiles, and the end of every job under two policies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.scheduling.application import Application, load_applications, read_csv
from benchmarks.scheduling.cluster import Setting, Simulation
from benchmarks.scheduling.published import Optimus, Tiresias
from benchmarks.scheduling.workload import load_workload

PUBLISHED: dict[str, Any] = {"tiresias": Tiresias, "optimus": Optimus}
FIELDS = ("first_alloc", "finish", "jct", "gpu_seconds", "restarts")


@dataclass(frozen=True)
class Points:
    """How many golden points there are, and the largest relative error."""

    count: int
    worst: float


def throughput_points(data: Path, apps: dict[str, Application]) -> Points:
    errors = []
    for row in read_csv(data / "golden" / "throughput_golden.csv"):
        placement = tuple(map(int, row["placement_gpus_per_node"].split("-")))
        found = apps[row["application"]].throughput(placement, int(row["local_bsz"]))
        true = float(row["step_time_s"]), float(row["sync_time_s"])
        errors += [_relative(a, b) for a, b in zip(found, true, strict=True)]
    return Points(len(errors) // 2, max(errors))


def gradient_points(data: Path, apps: dict[str, Application]) -> Points:
    errors, rows = [], read_csv(data / "golden" / "gradstats_golden.csv")
    for row in rows:
        app, epoch = apps[row["application"]], int(row["epoch"])
        found = (*app.gradients(int(row["batch_size"]), epoch), app.progress[epoch + 1])
        true = (float(row[name]) for name in ("grad_sqr", "grad_var", "progress_after_epoch"))
        errors += [_relative(a, b) for a, b in zip(found, true, strict=True)]
    return Points(len(rows), max(errors))


def _relative(found: float, true: float) -> float:
    return abs(found - true) / abs(true) if true else abs(found)


def differing_jobs(data: Path, apps: dict[str, Application], golden: Path) -> tuple[int, list[str]]:
    """The number of jobs, and those whose times differ from a golden file of jobs."""
    _, policy, number = golden.stem.split("-")
    workload = data / "workloads" / f"workload-{number[1:]}.csv"
    setting = Setting()
    simulation = Simulation(
        load_workload(workload, apps, adaptive=False, warm=False), PUBLISHED[policy](setting), setting
    )
    simulation.run()
    rows = {row["name"]: row for row in read_csv(golden)}
    differing = []
    for job in simulation.jobs:
        jct = (job.finished_s or 0) - job.submitted_s
        found = (job.first_alloc_s, job.finished_s, jct, job.gpu_seconds, job.restarts)
        if found != tuple(float(rows[job.name][name]) for name in FIELDS):
            differing.append(job.name)
    return len(rows), differing


def report(data: Path) -> dict[str, Any]:
    apps = load_applications(data)
    throughput, gradients = throughput_points(data, apps), gradient_points(data, apps)
    jobs = {}
    for golden in sorted((data / "golden").glob("jobs-*.csv")):
        count, differing = differing_jobs(data, apps, golden)
        jobs[golden.stem] = {"jobs": count, "equal": count - len(differing), "differing": differing}
    return {
        "throughput_points": throughput.count,
        "throughput_worst": throughput.worst,
        "gradient_points": gradients.count,
        "gradient_worst": gradients.worst,
        "jobs": jobs,
    }
