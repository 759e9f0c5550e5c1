"""A small data directory in the format of the published profiles: one application with step times from a formula."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

LOCAL_BATCHES = (4, 8, 16, 32)
BATCHES = (16, 64, 256)
EPOCHS = 5


def step_s(nodes: int, gpus: int, local: int) -> tuple[float, float]:
    sync = 0.0 if gpus == 1 else (0.02 if nodes == 1 else 0.05) + 0.001 * (gpus - 2)
    return 0.1 + 0.01 * local + sync, sync


def write_data(directory: Path, jobs: Sequence[tuple[str, int]]) -> Path:
    """`jobs`: name and time of submission."""
    profile = directory / "profiles" / "tiny"
    placements = ["1", "2", "3", "4", "11", "22", "34", "44", "444", "4444"]
    shapes = [(name, len(name), sum(map(int, name))) for name in placements]
    _write(
        profile / "placements.csv",
        "placement,local_bsz,step_time,sync_time",
        ((name, local, *step_s(nodes, gpus, local)) for name, nodes, gpus in shapes for local in LOCAL_BATCHES),
    )
    _write(
        profile / "scalability.csv",
        "num_nodes,num_replicas,local_bsz,step_time,sync_time",
        (
            (nodes, gpus, local, *step_s(nodes, gpus, local))
            for nodes in range(5, 17)
            for gpus in (nodes, 4 * nodes)
            for local in LOCAL_BATCHES
        ),
    )
    for batch in BATCHES:
        _write(
            profile / f"validation-{batch}.csv",
            "progress,iteration,metric,grad_sqr,grad_var",
            ((1000.0 * epoch, 1000 * 16 * epoch // batch, 0.5, 1.0, 4.0) for epoch in range(1, EPOCHS + 1)),
        )
    _write(
        directory / "golden" / "applications.csv",
        "application,init_batch_size,max_batch_size,min_local_bsz,max_local_bsz,max_epochs,total_progress",
        [("tiny", 16, 256, 4, 32, EPOCHS, 1000.0 * EPOCHS)],
    )
    _write(
        directory / "golden" / "isolated_jct.csv",
        "application,gpus,isolated_jct_s",
        [("tiny", 1, 1000), ("tiny", 4, 400), ("tiny", 64, 200)],
    )
    _write(
        directory / "workloads" / "workload-1.csv",
        "name,time,application,num_replicas,batch_size",
        ((name, time, "tiny", 4, 64) for name, time in jobs),
    )
    return directory


def _write(path: Path, header: str, rows: Iterable[Sequence[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header.split(","))
        writer.writerows(rows)
