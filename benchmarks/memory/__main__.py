"""python -m benchmarks.memory [side ...] [--workers 2 4] [--width 768] [--depth 28] [--keep]

Memory per worker of a GPT of about 200 million parameters, trained with AdamW: in one process, and sharded over several
by fsdp, tensor parallelism and a pipeline. The peak of a process is its private memory, sampled every two milliseconds
from before the model is built until the last step, minus the memory of Python and torch. It is compared with the n-th
part of a single process's peak.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich import print as show

from benchmarks import report

SIDES = ("fsdp", "tensor", "pipeline")
MB = 1 << 20


def run(side: str, size: int, shape: dict[str, int]) -> list[dict[str, Any]]:
    """The report of each process of a side."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "benchmarks.memory.worker", side]
        started = [
            subprocess.Popen(
                [*command, str(rank), str(size), str(Path(place) / "store"), json.dumps(shape)],
                stdout=subprocess.PIPE,
                env=report.environment() | {"OMP_WAIT_POLICY": "PASSIVE"},
            )
            for rank in range(size)
        ]
        told = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError(f"{side} on {size}: a worker failed")
    return [json.loads(text) for text in told]


def row(side: str, found: list[dict[str, Any]], alone: dict[str, Any]) -> dict[str, Any]:
    """The highest peak of all workers."""
    n, peak = len(found), max(one["peak"] for one in found)
    return {
        "side": side,
        "workers": n,
        "parameters here, MB": max(one["held"] for one in found) / MB,
        "peak until made, MB": max(one["made"] for one in found) / MB,
        "peak, MB": peak / MB,
        "1/n of one process, MB": alone["peak"] / n / MB,
        "peak beside 1/n": peak * n / alone["peak"],
        "s per step": max(one["step_s"] for one in found),
        "loss": found[0]["loss"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.memory", description=__doc__)
    report.take_names(parser, "side", SIDES)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    shape = {"vocabulary": 8192, "context": 16, "width": 768, "heads": 12, "depth": 28, "samples": 4, "steps": 3}
    for name, default in shape.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--keep", action="store_true", help="write the results to benchmarks/results")
    options = parser.parse_args()
    shape = {name: getattr(options, name) for name in shape}
    (alone,) = run("one", 1, shape)
    rows = [row("one process", [alone], alone)]
    for side in options.sides or SIDES:
        rows += [row(side, run(side, size, shape), alone) for size in options.workers]
    show(report.table(f"memory: {shape}", rows))
    if options.keep:
        report.keep("memory", "shards", {"setting": shape, "rows": rows})


if __name__ == "__main__":
    main()
