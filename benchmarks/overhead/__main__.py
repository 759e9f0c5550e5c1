"""python -m benchmarks.overhead [part ...] [--data DIR] [--quick]"""

from __future__ import annotations

import argparse
import importlib
import os
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks import report
from benchmarks.overhead.samples import gather
from benchmarks.overhead.side_by_side import Bench

PARTS = ("loop", "lanes", "start", "loader", "feed", "checkpoint", "self_check")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description="What Shoal costs.")
    report.take_names(parser, "part", PARTS)
    parser.add_argument("--data", type=Path, help="a directory with MNIST's IDX files and a shakespeare text")
    parser.add_argument("--quick", action="store_true", help="small sizes, few turns: does it work?")
    parser.add_argument("--turns", type=int, help="how often each side runs; 7, or 3 with --quick")
    asked = parser.parse_args()
    console = Console()
    os.environ.update(report.environment())
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        turns = asked.turns or (3 if asked.quick else 7)
        data = gather(asked.data, Path(scratch, "data"))
        bench = Bench(Path(scratch), data, repeats=turns, quick=asked.quick, say=console.print)
        for part in asked.parts or PARTS:
            rows = importlib.import_module(f"benchmarks.overhead.{part}").measure(bench)
            console.print(report.table(part, rows))
            if not asked.quick:
                report.keep("overhead", part, {"turns": turns, "rows": rows})


if __name__ == "__main__":
    main()
