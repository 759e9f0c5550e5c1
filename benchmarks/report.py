"""Common code of benchmarks: parse names on the command line, show a table, store results."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

RESULTS = Path(__file__).parent / "results"
SOURCES = Path(__file__).parents[1]


def take_names(parser: argparse.ArgumentParser, kind: str, known: Collection[str]) -> None:
    """Any number of parts, models or sides. (argparse's own `choices` refuses none of them.)"""

    def check(name: str) -> str:
        if name not in known:
            raise argparse.ArgumentTypeError(f"no such {kind}: {name}")
        return name

    told = f"of {'; '.join(known)}. All if none is named"
    parser.add_argument(f"{kind}s", nargs="*", type=check, metavar=kind, help=told)


def environment() -> dict[str, str]:
    """Environment for the processes of any side: one thread each, and an import path with these benchmarks."""
    paths = dict.fromkeys([str(SOURCES), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    made = Table(title=title)
    for name, value in rows[0].items():
        made.add_column(name, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        made.add_row(*map(_shown, row.values()))
    return made


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def kept(benchmark: str) -> dict[str, Any]:
    """The stored results of a benchmark, by part."""
    path = RESULTS / f"{benchmark}.json"
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def keep(benchmark: str, part: str, found: Mapping[str, Any]) -> None:
    """Store results beside those of the benchmark's other parts, with a description of the machine."""
    results = kept(benchmark) | {part: {"machine": machine(), **found}}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{benchmark}.json").write_text(json.dumps(results, indent=1) + "\n")


def machine() -> dict[str, Any]:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    return {"cores": os.cpu_count(), "cpu": capability, "torch": torch.__version__, "python": platform.python_version()}
