"""python -m benchmarks.bits.speed REV [--turns N] [--only WORD]

Is this tree as fast as the commit REV? Both run the same jobs through their command lines, in turns (A B, B A, …), so
that whatever slows the machine slows both. `speed` is steps per second between the first and the last fifth of a run;
`recovery` is the time from `kill -9` of one of three workers to the next committed step. `ratio` is the median over
turns of the ratio within a turn; `of the fastest` compares the fastest run of each side, which other work on the
machine disturbs least.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import report
from benchmarks.bits.__main__ import Tree, checked_out
from benchmarks.bits.cases import CNN, GPT, MLP, Case

QUIET = {"checkpoint": {"every": "never"}, "evaluate": {"every_steps": 100_000}}
KILLS = (300, 600, 900, 1200, 1500)


def cases() -> dict[str, tuple[Case, Callable[[Path], float]]]:
    """By name: what to run, and what to read from the run's directory. More is better."""
    made: dict[str, tuple[Case, Callable[[Path], float]]] = {}
    for name, job, steps in (("mlp", MLP, 6000), ("cnn", CNN, 2500), ("gpt", GPT, 1500)):
        for workers in (1, 2):
            lanes = 1 if workers == 1 else 2
            changes = QUIET | {"steps": steps, "workers": workers, "lanes": lanes}
            made[f"speed {name}, {workers} workers"] = Case(name, job, changes=changes), steps_per_s
    changes = QUIET | {"steps": 1800, "workers": 3, "lanes": 6}
    made["recovery mlp, 3 workers"] = Case("recovery", MLP, kills=KILLS, changes=changes), recoveries_per_s
    return made


def rows(there: Path, kind: str) -> list[dict[str, Any]]:
    (path,) = there.glob("runs/*/events.jsonl")
    return [row for row in map(json.loads, path.read_text().splitlines()) if row["kind"] == kind]


def steps_per_s(there: Path) -> float:
    found = [(row["t"], row["step"]) for row in rows(there, "step") if row["who"] == "worker-0"]
    last = found[-1][1]
    inside = [row for row in found if last / 5 <= row[1] <= last * 4 / 5]
    return float((inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0]))


def recoveries_per_s(there: Path) -> float:
    """One over the median time from a kill to the next step that any worker reports."""
    steps = sorted((row["t"], row["step"]) for row in rows(there, "step"))
    found = []
    for step in KILLS:
        killed_t = (there / f"killed-{step}").stat().st_mtime
        found.append(float(next(t for t, at in steps if t > killed_t and at > step)) - killed_t)
    return 1 / float(statistics.median(found))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bits.speed", description="As fast as another commit?")
    parser.add_argument("revision")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true", help="keep the table in results/bits.json")
    asked = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="shoal-speed-") as scratch:
        trees = {
            "before": Tree(checked_out(asked.revision, Path(scratch, "source")), Path(scratch, "before")),
            "now": Tree(report.SOURCES, Path(scratch, "now")),
        }
        table = []
        for name, (case, measure) in cases().items():
            if asked.only not in name:
                continue
            speeds: dict[str, list[float]] = {side: [] for side in trees}
            for turn in range(asked.turns):
                order = sorted(trees, reverse=bool(turn % 2))
                for side in order:
                    speeds[side].append(measure(trees[side].begin(case)))
            ratios = [now / before for now, before in zip(speeds["now"], speeds["before"], strict=True)]
            table.append(
                {
                    "case": name,
                    "per s": statistics.median(speeds["now"]),
                    "ratio": statistics.median(ratios),
                    "of the fastest": max(speeds["now"]) / max(speeds["before"]),
                    "lowest": min(ratios),
                    "highest": max(ratios),
                }
            )
            console.print(table[-1])
        console.print(report.table(f"this tree against {asked.revision}", table))
        if asked.write:
            report.keep("bits", f"speed against {asked.revision}", {"rows": table})
    return 0


if __name__ == "__main__":
    sys.exit(main())
