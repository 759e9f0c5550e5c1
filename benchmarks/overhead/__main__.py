"""python -m benchmarks.overhead [part ...] [--data DIR] [--quick]"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.overhead.samples import gather
from benchmarks.overhead.side_by_side import Bench, Row

PARTS = ("loop", "lanes", "start", "loader", "checkpoint")
RESULTS = Path(__file__).parents[1] / "results" / "overhead.json"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description="What Shoal costs.")
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--data", type=Path, help="a directory with MNIST's IDX files and a shakespeare text")
    parser.add_argument("--quick", action="store_true", help="small sizes, few turns: does it work?")
    asked = parser.parse_args()
    if unknown := set(asked.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    console = Console()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        data = gather(asked.data, Path(scratch, "data"))
        bench = Bench(Path(scratch), data, repeats=3 if asked.quick else 7, quick=asked.quick, say=console.print)
        for part in asked.parts or PARTS:
            rows = importlib.import_module(f"benchmarks.overhead.{part}").measure(bench)
            console.print(table(part, rows))
            if not asked.quick:
                keep(part, rows)


def table(title: str, rows: list[Row]) -> Table:
    made = Table(title=title)
    for name, value in rows[0].items():
        made.add_column(name, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        made.add_row(*map(shown, row.values()))
    return made


def shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def keep(part: str, rows: list[Row]) -> None:
    """Into the results, beside those of the other parts."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    kept[part] = {"machine": machine(), "rows": rows}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


def machine() -> dict[str, Any]:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    return {"cores": os.cpu_count(), "cpu": capability, "torch": torch.__version__, "python": platform.python_version()}


if __name__ == "__main__":
    main()
