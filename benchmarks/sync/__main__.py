"""python -m benchmarks.sync [model ...] [--workers N] [--side SIDE ...] [--data DIR] [--quick]"""

from __future__ import annotations

import argparse
import functools
import itertools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from benchmarks import report
from benchmarks.overhead.loop import STEPS
from benchmarks.overhead.runs import BATCH, open_fork_server
from benchmarks.overhead.samples import gather as gather_samples
from benchmarks.overhead.side_by_side import Bench, Numbers, Row, in_turns, median
from benchmarks.sync import ddp, lanes
from benchmarks.sync.stopwatch import gather
from shoal.fleet.forkserver import ForkServer

RIVAL = "ddp"


@dataclass(frozen=True)
class Comparison:
    """One model on all sides, with the same global batch, steps and threads."""

    model: str
    steps: int
    workers: int
    bench: Bench
    fork_server: ForkServer
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def plain(self, workers: int) -> Numbers:
        reports = self._reports()
        asked = {"model": self.model, "data": str(self.bench.data), "steps": self.steps, "workers": workers}
        ddp.run({**asked, "reports": str(reports)}, reports / "logs", self.fork_server)
        return gather(reports, workers=workers)

    def shoal(self, workers: int, lanes_each: int = 1) -> Numbers:
        reports = self._reports()
        lanes.run(
            self.model,
            self.bench.data,
            steps=self.steps,
            workers=workers,
            lanes=self.workers * lanes_each,
            reports=reports,
            runs=reports / "runs",
            fork_server=self.fork_server,
        )
        return gather(reports, workers=workers)

    def _reports(self) -> Path:
        made = self.bench.scratch / "reports" / self.model / str(next(self._numbers))
        made.mkdir(parents=True)
        return made

    def sides(self) -> dict[str, Callable[[], Numbers]]:
        return {
            "one process": functools.partial(self.plain, 1),
            RIVAL: functools.partial(self.plain, self.workers),
            "shoal, one worker": functools.partial(self.shoal, 1),
            "shoal": functools.partial(self.shoal, self.workers),
            "shoal, 2 lanes each": functools.partial(self.shoal, self.workers, 2),
            "shoal, 4 lanes each": functools.partial(self.shoal, self.workers, 4),
        }


SIDES = ("one process", RIVAL, "shoal, one worker", "shoal", "shoal, 2 lanes each", "shoal, 4 lanes each")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sync", description="Synchronous training, compared.")
    report.take_names(parser, "model", STEPS)
    parser.add_argument("--workers", type=int, default=2, help="processes of each side")
    parser.add_argument("--side", action="append", choices=SIDES, help="these alone, and not all; may be repeated")
    parser.add_argument("--data", type=Path, help="a directory with MNIST's IDX files and a shakespeare text")
    parser.add_argument("--quick", action="store_true", help="few steps, two turns, nothing written: does it work?")
    asked = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch, open_fork_server() as fork_server:
        data = gather_samples(asked.data, Path(scratch, "data"))
        bench = Bench(Path(scratch), data, repeats=2 if asked.quick else 7, quick=asked.quick, say=console.print)
        for model in asked.models or STEPS:
            rows = compare(model, asked.workers, asked.side or list(SIDES), bench, fork_server)
            console.print(report.table(f"sync: {model}", rows))
            if not asked.quick:
                report.keep("sync", model, {"rows": rows})


def compare(model: str, workers: int, sides: list[str], bench: Bench, fork_server: ForkServer) -> list[Row]:
    """`of ddp` is the ratio of the median steps per second to DDP's: 1 is as fast."""
    steps = STEPS[model] // (20 if bench.quick else 1)
    bench.say(f"sync: {model}, {workers} workers, {steps} steps, {bench.repeats} turns")
    contest = Comparison(model, steps, workers, bench, fork_server)
    found = in_turns({name: side for name, side in contest.sides().items() if name in sides}, bench.repeats)
    return [
        {
            "side": name,
            "steps": steps,
            "batch": BATCH[model],
            "steps/s": steps / median(numbers, "wall_s"),
            "CPU ms/step": 1000 * median(numbers, "cpu_s") / steps,
            "of ddp": median(found[RIVAL], "wall_s") / median(numbers, "wall_s") if RIVAL in found else "",
            "turns, s": [round(one["wall_s"], 4) for one in numbers],
        }
        for name, numbers in found.items()
    ]


if __name__ == "__main__":
    main()
