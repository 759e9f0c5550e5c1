"""python -m benchmarks.search kills [--kills 6] [--workers 2] [--trials 40]

How soon a search trains again after `kill -9`, with real runs through the command line. Kills alternate between the
search itself, which `shoal search resume` goes on with at once (a trial has no driver of its own), and a process that
trains a trial. Told for both kinds, each as median and largest:

`driver s` (of the search only): from the kill until the new driver writes its first row. `step s`: from the kill to the
next step of training, after that row, or by the process that replaces the killed one. `pause s`: the longest time in
which no process began a step, from the kill to that step.

At the end: `same` (decisions and weights of a search that nobody killed), `processes left`, `zombies` (trials that
count as running).
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.search.net import STEPS_FILE
from benchmarks.search.ray_cluster import processes_with
from shoal.jobs.search import search_dir
from shoal.jobs.search.journal import StartedRow, ToldRow, rows_of
from shoal.jobs.search.receipt import SearchReceipt
from shoal.jobs.search.summary import StoredSearch, read_search
from shoal.spec.load import make_job, save_job

MARK = "SHOAL_BENCHMARK_KILLS"
LOOK_S = 0.01
LIMIT_S = 120.0
LIVELY_S = 0.3
"""A process that began a step so recently trains."""


def write_job(directory: Path, *, trials: int, steps: int, workers: int) -> None:
    search = {
        "metric": "accuracy",
        "space": {
            "optimizer.args.lr": {"low": 1e-4, "high": 1e-1, "log": True},
            "batch_size": {"low": 32, "high": 128, "log": True},
        },
        "policy": {"kind": "promote", "first": 2},
        "budget": f"{trials} trials",
        "slots": 2 * workers,
    }
    job = {
        "name": "kills",
        "model": {"name": "benchmarks.search.net:SteppingNet"},
        "loss": "CrossEntropyLoss",
        "metrics": ["accuracy"],
        "optimizer": {"name": "AdamW", "args": {"lr": 0.001}},
        "data": {"source": {"kind": "sklearn", "name": "digits"}, "split": "holdout"},
        "batch_size": 64,
        "steps": steps,
        "evaluate": {"every_steps": steps // 8},
        "search": search,
    }
    save_job(make_job(job), directory / "job.yaml")


@dataclass
class DrivenSearch:
    """A search as a user's process, the steps of its trials, and the kills so far."""

    directory: Path
    workers: int
    process: subprocess.Popen[bytes] | None = None
    found: list[dict[str, Any]] = field(default_factory=list)
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def start(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "shoal", "search", *arguments, "--runs", str(self.directory / "runs"), "-q"]
        marks = {MARK: str(self.directory), STEPS_FILE: str(self.directory / "steps")}
        with open(self.directory / "log", "ab") as log:
            self.process = subprocess.Popen(
                [*command, "--workers", str(self.workers)], env=os.environ | marks, stdout=log, stderr=log
            )

    def steps(self) -> list[tuple[float, int]]:
        """When which process began a step."""
        file = self.directory / "steps"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [(float(t), int(pid)) for t, _, pid in (line.partition(" ") for line in lines)]

    def trainers(self) -> list[int]:
        since = time.time() - LIVELY_S
        return sorted({pid for t, pid in self.steps() if t > since})

    def stored(self) -> StoredSearch:
        return read_search(search_dir.find("last", self.directory / "runs"))

    def told(self) -> int:
        journals = list((self.directory / "runs").glob("*/search.jsonl"))
        return len(rows_of(self.stored().rows, ToldRow)) if journals else 0

    def wait(self, condition: Callable[[], bool]) -> bool:
        """False if the search ends before."""
        deadline_s = time.monotonic() + LIMIT_S
        while not condition():
            if self.process is None or self.process.poll() is not None:
                return False
            if time.monotonic() > deadline_s:
                raise SystemExit(f"the search does not go on: {(self.directory / 'log').read_text()[-2000:]}")
            time.sleep(LOOK_S)
        return True

    def kill_driver(self) -> None:
        assert self.process is not None
        starts = len(rows_of(self.stored().rows, StartedRow))
        killed_t = time.time()
        self.process.kill()
        self.process.wait()
        self.start("resume", "last")

        def begun() -> list[StartedRow]:
            return rows_of(self.stored().rows, StartedRow)[starts:]

        if self.wait(lambda: bool(begun())):
            started_t = begun()[0].t
            self._note("search", killed_t, lambda t, pid: t > started_t, {"driver s": started_t - killed_t})

    def kill_trainer(self) -> None:
        known = {pid for _, pid in self.steps()}
        killed_t = time.time()
        os.kill(self.rng.choice(self.trainers()), signal.SIGKILL)
        self._note("trial", killed_t, lambda t, pid: pid not in known, {})

    def _note(self, what: str, killed_t: float, is_next: Callable[[float, int], bool], more: dict[str, float]) -> None:
        def next_t() -> float | None:
            return next((t for t, pid in self.steps() if t > killed_t and is_next(t, pid)), None)

        if self.wait(lambda: next_t() is not None):
            at = next_t()
            assert at is not None
            times = [killed_t, *sorted(t for t, _ in self.steps() if killed_t < t <= at)]
            pause = max(later - sooner for sooner, later in itertools.pairwise(times))
            self.found.append({"killed": what, "step s": at - killed_t, "pause s": pause, **more})


def drive(directory: Path, asked: argparse.Namespace, *, kills: int) -> tuple[DrivenSearch, SearchReceipt]:
    directory.mkdir()
    write_job(directory, trials=asked.trials, steps=asked.steps, workers=asked.workers)
    search = DrivenSearch(directory, asked.workers)
    search.start(str(directory / "job.yaml"))
    for number in range(kills):
        told = search.told()
        if not search.wait(lambda told=told: search.told() >= told + 2 and len(search.trainers()) == asked.workers):  # type: ignore[misc]
            raise SystemExit("the search ended before all kills: give it more --trials")
        time.sleep(search.rng.uniform(0.0, 1.0))
        search.kill_trainer() if number % 2 else search.kill_driver()
    assert search.process is not None
    search.process.wait()
    receipt = search.stored().receipt
    if receipt is None:
        raise SystemExit(f"the search did not end: {(directory / 'log').read_text()[-2000:]}")
    return search, receipt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=6, help="of each kind")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--steps", type=int, default=12_000, help="of a whole training: it lasts some seconds")


def run(asked: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="shoal-kills-") as scratch:
        _, calm = drive(Path(scratch, "calm"), asked, kills=0)
        search, receipt = drive(Path(scratch, "killed"), asked, kills=2 * asked.kills)
        time.sleep(1.0)
        end = {
            "same": receipt.search_sha256 == calm.search_sha256,
            "processes left": len(processes_with(MARK, str(search.directory))),
            "zombies": sum(trial.state == "running" for trial in search.stored().table.trials.values()),
        }
    return [summary(kind, [one for one in search.found if one["killed"] == kind]) | end for kind in ("search", "trial")]


def summary(kind: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"killed": kind, "kills": len(found)}
    for name in ("driver s", "step s", "pause s"):
        values = [one[name] for one in found if name in one]
        row[name] = round(statistics.median(values), 3) if values else None
        row[f"largest {name}"] = round(max(values), 3) if values else None
    return row
