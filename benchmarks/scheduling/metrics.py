"""Numbers of a simulated workload: completion times, makespan and fairness."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.scheduling.application import read_csv
from benchmarks.scheduling.cluster import Simulation
from shoal.plan.scheduling.views import Floats

Isolated = Mapping[str, tuple[Floats, Floats]]
"""By application: numbers of GPUs, and the best time alone on at most so many."""

PRICES: Sequence[float] = np.geomspace(1e-4, 1.0, 120).tolist()
"""Of a GPU second, in seconds of a job."""


def load_isolated(data: Path) -> Isolated:
    found: dict[str, list[tuple[float, float]]] = {}
    for row in read_csv(data / "golden" / "isolated_jct.csv"):
        found.setdefault(row["application"], []).append((float(row["gpus"]), float(row["isolated_jct_s"])))
    tables = {key: np.array(sorted(rows)).T for key, rows in found.items()}
    return {key: (gpus, np.minimum.accumulate(times)) for key, (gpus, times) in tables.items()}


def isolated_s(known: tuple[Floats, Floats], gpus: float) -> float:
    """Time alone on so many GPUs: between known sizes on a line of logarithms, below one GPU a share of it."""
    sizes, times = known
    if gpus < 1:
        return float(times[0]) / gpus
    return float(np.exp(np.interp(np.log(gpus), np.log(sizes), np.log(times))))


def unfairness(submitted: Floats, finished: Floats, apps: Sequence[str], gpus: int, alone: Isolated) -> Floats:
    """For each job: its time, divided by that alone on the share of GPUs that an equal division would have given."""
    found = []
    for start, end, app in zip(submitted, finished, apps, strict=True):
        together = np.minimum(finished, end) - np.maximum(submitted, start)
        others = float(np.maximum(together, 0.0).sum()) / max(end - start, 1.0)
        found.append((end - start) / isolated_s(alone[app], gpus / others))
    return np.array(found)


def rhos(simulation: Simulation, alone: Isolated) -> Floats:
    jobs, setting = simulation.jobs, simulation.setting
    submitted = np.array([job.submitted_s for job in jobs], np.float64)
    finished = np.array([job.finished_s for job in jobs], np.float64)
    names = [job.app.name for job in jobs]
    return unfairness(submitted, finished, names, setting.nodes * setting.gpus_per_node, alone)


def summary(simulation: Simulation, alone: Isolated) -> dict[str, float]:
    jobs = simulation.jobs
    submitted = np.array([job.submitted_s for job in jobs], np.float64)
    finished = np.array([job.finished_s for job in jobs], np.float64)
    times = finished - submitted
    rho = rhos(simulation, alone)
    cpu_ms = 1e3 * np.array([decision.cpu_s for decision in simulation.decisions])
    return {
        "mean_jct": float(times.mean()),
        "p50": float(np.percentile(times, 50)),
        "p99": float(np.percentile(times, 99)),
        "max_jct": float(times.max()),
        "makespan": float(finished.max()),
        "gpu_hours": sum(job.gpu_seconds for job in jobs) / 3600,
        "restarts": statistics.fmean(job.restarts for job in jobs),
        "rho_mean": float(rho.mean()),
        "rho_p99": float(np.percentile(rho, 99)),
        "rho_max": float(rho.max()),
        "decision_ms": float(cpu_ms.mean()),
        "decision_ms_p99": float(np.percentile(cpu_ms, 99)),
        "decisions": len(cpu_ms),
    }


def makespan_bound(simulation: Simulation, alone: Isolated) -> float:
    """No earlier end is possible while jobs keep one size: the last one alone on all GPUs, or all at their cheapest."""
    gpus = simulation.setting.nodes * simulation.setting.gpus_per_node
    last = max(job.submitted_s + isolated_s(alone[job.app.name], gpus) for job in simulation.jobs)
    work = sum(float((alone[job.app.name][0] * alone[job.app.name][1]).min()) for job in simulation.jobs)
    return max(last, min(job.submitted_s for job in simulation.jobs) + work / gpus)


def mean_bound(simulation: Simulation, alone: Isolated) -> float:
    """No shorter mean time is possible with the GPU seconds until the present end, while jobs keep one size: as if no
    job ever waited for another. The dual of that choice of sizes; every price of a GPU second gives a bound."""
    jobs = simulation.jobs
    gpus = simulation.setting.nodes * simulation.setting.gpus_per_node
    until_s = max(job.finished_s or 0.0 for job in jobs) - min(job.submitted_s for job in jobs)
    tables = [alone[job.app.name] for job in jobs]
    totals: list[float] = [
        sum(float((times * (1.0 + price * sizes)).min()) for sizes, times in tables) - price * until_s * gpus
        for price in PRICES
    ]
    return max(totals) / len(jobs)


def mean_summary(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(one[name] for one in found) for name in found[0]}
