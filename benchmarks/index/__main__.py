"""python -m benchmarks.index: what `shoal runs` and `shoal show` take, by folding all events and from snapshots.

The runs are made up; their events have the sizes of real ones. `fold all` reads every event of every run, as if there
were no snapshots; `cold` is the first look, which leaves snapshots and an index behind; `warm` is the next; `grown` the
next after more rows have come. Reading and printing are measured together, in this process, without the start of
Python.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import report
from shoal.events import Event, load_state, read_events, replay
from shoal.events.snapshot import IDLE_S
from shoal.events.stream import format_event
from shoal.jobs import run_dir, run_index
from shoal.spec.run_paths import RunPaths
from shoal.terminal import reports
from shoal.terminal.console import make_console

TURNS = 5
WIDTH = 140
ROWS_PER_SMALL_RUN = 100
GROWTH_ROWS = 1000
PARTS = ("runs", "rows")
STARTED_T = 1.7e9


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.index", description=__doc__)
    report.take_names(parser, "part", PARTS)
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing is kept: does it work?")
    asked = parser.parse_args()
    console = Console()
    for part in asked.parts or PARTS:
        with tempfile.TemporaryDirectory(prefix="shoal-index-") as scratch:
            found = measure(part, Path(scratch), quick=asked.quick)
        console.print(report.table(f"{part}: {found['what']}", found["rows"]))
        if not asked.quick:
            report.keep("index", part, found)


def measure(part: str, scratch: Path, *, quick: bool) -> dict[str, Any]:
    if part == "runs":
        return many_runs(scratch, count=30 if quick else 10_000)
    return many_rows(scratch, count=2_000 if quick else 1_000_000)


def many_runs(scratch: Path, *, count: int) -> dict[str, Any]:
    """`shoal runs` over this many runs."""
    for number in range(count):
        write_run(RunPaths(scratch / f"made-{number + 1}"), rows=ROWS_PER_SMALL_RUN)

    def fold_all() -> None:
        states = [replay(read_events(paths.events)) for paths in run_dir.list_runs(scratch)]
        assert sum(state.step for state in states) == count * ROWS_PER_SMALL_RUN

    def look() -> None:
        rows = run_index.list_summaries(scratch)
        assert sum(row["step"] for row in rows) == count * ROWS_PER_SMALL_RUN
        reports.print_runs(_console(), rows)

    what = f"a list of {count:,} runs with {ROWS_PER_SMALL_RUN} steps each"
    return {"what": what, "rows": [timed("fold all", fold_all), timed("cold", look), timed("warm", look, turns=TURNS)]}


def many_rows(scratch: Path, *, count: int) -> dict[str, Any]:
    """`shoal show` of a run with this many rows."""
    paths = RunPaths(scratch / "made-1")
    write_run(paths, rows=count)

    def fold_all() -> None:
        reports.print_run(_console(), replay(read_events(paths.events)), width=WIDTH)

    def look() -> None:
        reports.print_run(_console(), load_state(paths.events, paths.state_snapshot), width=WIDTH)

    rows = [timed("fold all", fold_all), timed("cold", look), timed("warm", look, turns=TURNS)]
    with paths.events.open("ab") as file:
        file.writelines(step_lines(count + 1, GROWTH_ROWS))
    rows.append(timed("grown", look))
    size_bytes, snapshot_bytes = paths.events.stat().st_size, paths.state_snapshot.stat().st_size
    what = f"one run with {count:,} rows; grown by {GROWTH_ROWS:,}"
    return {"what": what, "events_bytes": size_bytes, "snapshot_bytes": snapshot_bytes, "rows": rows}


def timed(name: str, act: Callable[[], None], *, turns: int = 1) -> dict[str, Any]:
    """The median of the turns, in seconds."""
    wall, processor = [], []
    for _ in range(turns):
        wall_s, processor_s = time.perf_counter(), time.process_time()
        act()
        wall.append(time.perf_counter() - wall_s)
        processor.append(time.process_time() - processor_s)
    return {"look": name, "s": round(statistics.median(wall), 4), "cpu s": round(statistics.median(processor), 4)}


def write_run(paths: RunPaths, *, rows: int) -> None:
    """A run that made so many steps and was then broken off, some time ago."""
    paths.root.mkdir()
    paths.job.write_text("name: made\n")
    with paths.events.open("wb") as file:
        file.write(format_event(Event("run_started", STARTED_T, "driver", None, {"run": paths.name})))
        file.write(format_event(Event("built", STARTED_T, "worker-0", None, _built(rows))))
        file.write(format_event(Event("joined", STARTED_T, "worker-0", 0, {"lanes": [0, 1], "view": 1})))
        file.writelines(step_lines(1, rows))
    long_ago = time.time() - 2 * IDLE_S
    os.utime(paths.events, (long_ago, long_ago))


def _built(steps: int) -> dict[str, Any]:
    samples = {"train": 50_000, "validation": 10_000}
    return {"steps": steps, "steps_per_epoch": 100, "lanes": 4, "samples": samples, "skipped": 0, "device": "cpu"}


def step_lines(first: int, count: int) -> Iterator[bytes]:
    for step in range(first, first + count):
        fields = {
            "steps": 1,
            "loss": 2.302585 / (1 + step / 100),
            "lr": 0.0012345,
            "samples": 128,
            "wall_s": 0.051234,
            "bytes_sent": 123456,
            "bytes_plain": 123456,
            "data_s": 0.001234,
            "compute_s": 0.045678,
            "exchange_s": 0.002345,
            "waiting_s": 0.000123,
        }
        yield format_event(Event("step", STARTED_T + 0.05 * step, "worker-0", step, fields))


def _console() -> Console:
    return make_console(file=io.StringIO(), width=WIDTH)


if __name__ == "__main__":
    main()
