"""python -m benchmarks.sparse [--rows 10000000] [--dim 16] [--servers 2] [--workers 1] [--passes 2]

A table all of whose rows are asked for and changed once in each pass, on real servers, each row on one of them and a
copy on another. In the first pass rows are made, in later ones they are found. Rows per second through the whole way
(asked for, pushed, added up, applied, copied, acknowledged), and the memory of the servers.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import psutil
from rich import print as show

from benchmarks import report
from benchmarks.sparse.model import IDS
from shoal.events import Event, RunState
from shoal.jobs import run_executor
from shoal.spec.load import make_job
from shoal.spec.run_paths import RunPaths

BATCH = 2048


class RunWatch:
    """Records the times of steps and the memory of the servers."""

    def __init__(self) -> None:
        self.servers: dict[str, psutil.Process] = {}
        self.steps: list[tuple[int, float]] = []
        self.rss: dict[str, int] = {}

    def __call__(self, paths: RunPaths, event: Event, state: RunState) -> None:
        if event.kind == "server_started":
            self.servers[event["server"]] = psutil.Process(event["pid"])
        elif event.kind == "step" and event.step is not None:
            self.steps.append((event.step, event.t))
            for name, process in self.servers.items():
                self.rss[name] = max(self.rss.get(name, 0), process.memory_info().rss)


def measure(rows: int, dim: int, servers: int, workers: int, passes: int, place: Path) -> dict[str, Any]:
    watch = RunWatch()
    args = {"rows": rows, "dim": dim}
    job = make_job(
        {
            "name": "sparse",
            "model": {"name": "benchmarks.sparse.model:EmbeddingSum", "args": args},
            "loss": "MSELoss",
            "optimizer": {"name": "SGD", "args": {"lr": 0.01}},
            "data": {
                "source": {
                    "kind": "python",
                    "factory": {"name": "benchmarks.sparse.model:row_ids", "args": {"rows": rows}},
                },
                "split": {"kind": "none"},
                "leaks": "ignore",
            },
            "sync": {"kind": "server", "servers": servers},
            "batch_size": BATCH,
            "lanes": max(workers, 1),
            "workers": workers,
            "epochs": passes,
            "checkpoint": {"every": "never"},
            "export": [],
        },
        base_dir=str(place),
    )
    outcome = run_executor.run(job, runs=place / "runs", on_event=watch)
    if outcome.receipt is None:
        raise RuntimeError(str(outcome))
    a_pass = -(-(rows // IDS) // BATCH)
    return {
        **{f"rows/s in pass {i + 1}": speed(watch.steps, i * a_pass, (i + 1) * a_pass) for i in range(passes)},
        "bytes sent per row": outcome.receipt.bytes_sent / (passes * rows),
        "bytes per row on a server": max(watch.rss.values()) / rows,
        "GB on each server": max(watch.rss.values()) / 1e9,
        "seconds": outcome.receipt.total_s,
    }


def speed(steps: list[tuple[int, float]], first: int, last: int) -> float:
    """Seconds between the first and the last event of these steps."""
    inside = [(step, time) for step, time in steps if first < step <= last]
    (a, began), (b, ended) = inside[0], inside[-1]
    return (b - a) * BATCH * IDS / (ended - began)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.sparse", description=__doc__)
    for name, default in (("rows", 10_000_000), ("dim", 16), ("servers", 2), ("workers", 1), ("passes", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--keep", action="store_true", help="write the results to benchmarks/results")
    options = vars(parser.parse_args())
    keeps = options.pop("keep")
    with tempfile.TemporaryDirectory() as place:
        found = measure(**options, place=Path(place))
    show(report.table(f"sparse tables: {options}", [{"what": what, "found": value} for what, value in found.items()]))
    if keeps:
        report.keep("sparse", "rows", {"setting": options, "found": found})


if __name__ == "__main__":
    main()
