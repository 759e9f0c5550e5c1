"""python -m benchmarks.queue: a queue of 10,000 jobs, and six jobs that share a machine, long ones and short ones."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import report
from benchmarks.queue.many import many_jobs
from benchmarks.queue.six import six_jobs

PARTS = ("many", "six", "light")
UNIT_STEPS = {"six": 2000, "light": 400}
"""Jobs of `six` come faster than two cores can serve them; those of `light` hardly ever meet another."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.queue", description=__doc__)
    report.take_names(parser, "part", PARTS)
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing is kept: does it work?")
    asked = parser.parse_args()
    console = Console()
    for part in asked.parts or PARTS:
        with tempfile.TemporaryDirectory(prefix="shoal-queue-") as scratch:
            found = measure(part, Path(scratch), quick=asked.quick)
        console.print(report.table(f"{part}: {found['what']}", found["rows"]))
        if "same bits" in found:
            console.print(f"the same bits in every way: {found['same bits']}")
            console.print("elastic, who had how many workers when:", *found["picture"], sep="\n")
        if not asked.quick:
            report.keep("queue", part, found)


def measure(part: str, scratch: Path, *, quick: bool) -> dict[str, Any]:
    if part == "many":
        return many_jobs(scratch / "runs", count=50 if quick else 10_000)
    return six_jobs(scratch, unit_steps=40 if quick else UNIT_STEPS[part], every_s=1.0 if quick else 10.0)


if __name__ == "__main__":
    main()
