"""Files of one simulated workload: enough to compare job by job, and to replay every change."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.scheduling.cluster import Simulation
from benchmarks.scheduling.metrics import Isolated, rhos


def write(directory: Path, simulation: Simulation, alone: Isolated, summary: Mapping[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    _table(directory / "jobs.csv", _jobs(simulation, alone))
    _table(directory / "decisions.csv", [asdict(decision) for decision in simulation.decisions])
    with (directory / "events.jsonl").open("w") as file:
        for change in simulation.changes:
            row = {"t": change.t, "job": change.job, "from": change.before, "to": change.after}
            file.write(json.dumps(row) + "\n")
    (directory / "summary.json").write_text(json.dumps(dict(summary), indent=1) + "\n")


def _jobs(simulation: Simulation, alone: Isolated) -> list[dict[str, Any]]:
    return [
        {
            "name": job.name,
            "application": job.app.name,
            "submit": job.submitted_s,
            "first_alloc": job.first_alloc_s,
            "finish": job.finished_s,
            "jct": (job.finished_s or 0) - job.submitted_s,
            "gpu_seconds": job.gpu_seconds,
            "restarts": job.restarts,
            "rho": round(rho, 4),
        }
        for job, rho in zip(simulation.jobs, rhos(simulation, alone).tolist(), strict=True)
    ]


def _table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
