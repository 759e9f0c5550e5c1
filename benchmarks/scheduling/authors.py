"""Results that the authors of Pollux published for the same workloads, with the same numbers as ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.scheduling.application import read_csv
from benchmarks.scheduling.metrics import Isolated, mean_summary, unfairness

FOLDERS = {"1.0": "workloads", "0.5": "workloads-0.5"}
GPUS = 64


def report(data: Path, alone: Isolated) -> dict[str, Any]:
    found = {}
    for path in sorted((data / "authors").glob("*.json")):
        load = path.stem.split("-")[1]
        times = json.loads(path.read_text())["jcts"]
        rows = {name: _numbers(data / FOLDERS[load] / f"{name}.csv", own, alone) for name, own in sorted(times.items())}
        found[path.stem] = mean_summary(list(rows.values())) | {"workloads": rows}
    return found


def _numbers(workload: Path, jct: dict[str, float], alone: Isolated) -> dict[str, float]:
    rows = read_csv(workload)
    submitted = np.array([float(row["time"]) for row in rows])
    times = np.array([float(jct[row["name"]]) for row in rows])
    rho = unfairness(submitted, submitted + times, [row["application"] for row in rows], GPUS, alone)
    return {
        "mean_jct": float(times.mean()),
        "p50": float(np.percentile(times, 50)),
        "p99": float(np.percentile(times, 99)),
        "makespan": float((submitted + times).max()),
        "rho_p99": float(np.percentile(rho, 99)),
        "rho_max": float(rho.max()),
    }
