"""python -m benchmarks.search kills [--kills 20] [--driver-kills 3] [--every 2.0]

One search on 1, 2, 3 and 4 workers, and once more on two workers while `kill -9` hits a training process every
`--every` seconds (each seventh time the search itself, which is then resumed). `one_search`: whether all of them have
the same SHA-256 over decisions, values and the winner's weights. `after worker s`: seconds from the kill of a training
process to the next event of a worker that trains this trial (it has joined, or made a step), if it had a step to make;
the median and the largest. `after driver s`: from the start of the process that resumes the search. `results lost`:
results in the journal before a kill that are not in it at the end, or twice. `processes left`: alive at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.search.ray_cluster import processes_with
from shoal.events import read_events
from shoal.fleet.orphans import locked_seats
from shoal.jobs.search import search_dir
from shoal.jobs.search.journal import DecidedRow, ToldRow, read_rows, rows_of
from shoal.jobs.search.receipt import SearchReceipt, read_receipt
from shoal.jobs.search.search_dir import SearchPaths
from shoal.spec.load import make_job, save_job

MARK = "SHOAL_BENCHMARK_KILLS"
TRAINS = {"joined", "step", "evaluated"}
TICK_S = 0.05
DRIVER_EVERY = 7


def write_job(file: Path, *, steps: int, trainings: float) -> None:
    """A search with the default policy, over trials whose costs differ."""
    job = make_job(
        {
            "name": "kills",
            "model": {"name": "benchmarks.search.net:digits_net", "args": {"hidden": 128, "layers": 3}},
            "loss": "CrossEntropyLoss",
            "metrics": ["accuracy"],
            "optimizer": {"name": "AdamW", "args": {"lr": 0.001}},
            "data": {"source": {"kind": "sklearn", "name": "digits"}, "split": "holdout"},
            "batch_size": 64,
            "steps": steps,
            "evaluate": {"every_steps": steps // 10},
            "lanes": 2,
            "search": {
                "metric": "loss",
                "space": {
                    "optimizer.args.lr": {"low": 1e-5, "high": 1e-1, "log": True},
                    "model.args.hidden": {"low": 64, "high": 256, "log": True},
                    "optimizer": [{"name": "AdamW"}, {"name": "SGD", "args": {"momentum": {"low": 0.0, "high": 0.99}}}],
                },
                "budget": f"{trainings} trainings",
            },
        }
    )
    save_job(job, file)


@dataclass
class Searching:
    """The processes of one search in a directory of its own."""

    scratch: Path
    workers: int
    killed: list[tuple[float, int]] = field(default_factory=list)
    """When, and the trial whose process it was; -1 is the search itself."""
    resumed_t: list[float] = field(default_factory=list)
    told: set[int] = field(default_factory=set)
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def runs(self) -> Path:
        return self.scratch / f"runs-{self.workers}-{len(list(self.scratch.glob('runs-*')))}"

    def start(self, runs: Path, *, resume: bool) -> subprocess.Popen[bytes]:
        what = ["resume", "last"] if resume else [str(self.scratch / "job.yaml")]
        command = [sys.executable, "-m", "shoal", "search", *what, "--runs", str(runs), "-q"]
        with open(self.scratch / "driver.log", "ab") as log:
            return subprocess.Popen(
                [*command, "--workers", str(self.workers)],
                stdout=log,
                stderr=log,
                env=os.environ | {MARK: str(self.scratch)},
                start_new_session=True,
            )

    def run(self, *, kills: int = 0, driver_kills: int = 0, every_s: float = 1.0) -> tuple[SearchPaths, SearchReceipt]:
        """The search to its end. A driver that fails by itself ends the benchmark."""
        runs = self.runs
        runs.mkdir()
        process, next_s = self.start(runs, resume=False), time.monotonic() + every_s
        while process.poll() is None or process.returncode == -signal.SIGKILL:
            if process.poll() is not None:
                self.resumed_t.append(time.time())
                process, next_s = self.start(runs, resume=True), time.monotonic() + every_s
            drivers = sum(trial < 0 for _, trial in self.killed)
            if time.monotonic() >= next_s and len(self.killed) < kills + driver_kills:
                at_driver = drivers < driver_kills and (
                    len(self.killed) % DRIVER_EVERY == DRIVER_EVERY - 1 or len(self.killed) - drivers >= kills
                )
                if self._kill(runs, process if at_driver else None):
                    next_s = time.monotonic() + every_s
            time.sleep(TICK_S)
        if process.returncode:
            raise SystemExit((self.scratch / "driver.log").read_text()[-2000:])
        paths = search_dir.find("last", runs)
        receipt = read_receipt(paths.receipt)
        assert receipt is not None
        return paths, receipt

    def _kill(self, runs: Path, driver: subprocess.Popen[bytes] | None) -> bool:
        with contextlib.suppress(Exception):
            paths = search_dir.find("last", runs)
            trial, pid = (-1, driver.pid) if driver else self.rng.choice(training_processes(paths))
            self.told |= results(paths)
            os.kill(pid, signal.SIGKILL)
            self.killed.append((time.time(), trial))
            if driver is not None:
                driver.wait()
            return True
        return False


def training_processes(paths: SearchPaths) -> list[tuple[int, int]]:
    """(trial, process) of all workers, as the locks of their seats name them."""
    found = []
    for directory in sorted(paths.root.glob("trial-*")):
        run = paths.trial(int(directory.name[6:]))
        for seat in locked_seats(run):
            with contextlib.suppress(OSError, ValueError):
                found.append((int(directory.name[6:]), int(run.seat_lock(seat.number, seat.role).read_text())))
    return found


def results(paths: SearchPaths) -> set[int]:
    return {row.number for row in rows_of(read_rows(paths.journal)[0], ToldRow)}


def seconds_until_trained(paths: SearchPaths, searching: Searching) -> tuple[list[float], list[float]]:
    """After the kill of a worker, until a worker of this trial trains; after a resume, until any does."""
    rows = read_rows(paths.journal)[0]
    trial_of = {row.number: row.trial for row in rows_of(rows, DecidedRow)}
    told_t = [(row.t, trial_of[row.number]) for row in rows_of(rows, ToldRow)]
    trained: dict[int, list[float]] = {}
    for directory in paths.root.glob("trial-*"):
        events = read_events(directory / "events.jsonl")
        trained[int(directory.name[6:])] = sorted(event.t for event in events if event.kind in TRAINS)
    drivers = [t for t, trial in searching.killed if trial < 0]
    after_worker = []
    for killed_t, trial in searching.killed:
        later = next((t for t in trained.get(trial, ()) if t > killed_t), math.inf)
        ended = min((t for t, told in told_t if told == trial and t > killed_t), default=math.inf)
        if later < min([ended, *(t for t in drivers if t > killed_t)]):  # else it had nothing left to train
            after_worker.append(later - killed_t)
    every = sorted(t for times in trained.values() for t in times)
    return after_worker, [next(t for t in every if t > began) - began for began in searching.resumed_t]


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 3), "largest": round(max(values), 3)} if values else {}


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="shoal-kills-") as directory:
        scratch = Path(directory)
        write_job(scratch / "job.yaml", steps=asked.steps, trainings=asked.trainings)
        calm = {workers: Searching(scratch, workers).run()[1] for workers in asked.workers}
        searching = Searching(scratch, 2)
        paths, receipt = searching.run(kills=asked.kills, driver_kills=asked.driver_kills, every_s=asked.every)
        after_worker, after_driver = seconds_until_trained(paths, searching)
        numbers = [row.number for row in rows_of(read_rows(paths.journal)[0], ToldRow)]
        lost = len(searching.told - set(numbers)) + len(numbers) - len(set(numbers))
        return {
            "workers": asked.workers,
            "trials": receipt.trials,
            "decisions": receipt.decisions,
            "seconds": {workers: one.total_s for workers, one in calm.items()},
            "one_search": len({one.search_sha256 for one in [*calm.values(), receipt]}) == 1,
            "exact": [one.exact for one in [*calm.values(), receipt]],
            "search_sha256": receipt.search_sha256,
            "worker kills": sum(trial >= 0 for _, trial in searching.killed),
            "driver kills": sum(trial < 0 for _, trial in searching.killed),
            "after worker s": spread(after_worker),
            "after driver s": spread(after_driver),
            "results lost": lost,
            "failed": receipt.failed,
            "processes left": len(processes_with(MARK, str(scratch))),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--kills", type=int, default=20, help="of training processes")
    parser.add_argument("--driver-kills", type=int, default=3)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between kills")
    parser.add_argument("--steps", type=int, default=2000, help="of a whole training")
    parser.add_argument("--trainings", type=float, default=12.0)


def run(asked: argparse.Namespace) -> list[dict[str, Any]]:
    return [measure(asked)]
