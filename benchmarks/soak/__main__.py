"""python -m benchmarks.soak [--minutes 60] [--every 10] [--workers 3] [--seed 0]

A run is disturbed every few seconds: a worker is killed or frozen, one joins, one leaves. Meanwhile memory,
descriptors, threads and processes are counted. At the end the run is stopped, and an undisturbed run of as many steps
must have the same weights.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.reference_run import reference_weights, saved_weights
from benchmarks.report import RESULTS, environment, machine
from shoal.errors import ShoalError
from shoal.events import EventReader, RunState
from shoal.jobs import commands
from shoal.spec.run_paths import RunPaths

HERE = Path(__file__).parent
PAUSE_S = 0.02
LANES = 8

JOB = {
    "name": "soak",
    "task": "task.py:SleepingTask",
    "optimizer": {"name": "AdamW", "args": {"lr": 0.001}},
    "data": {"source": {"kind": "sklearn", "name": "digits"}, "split": {"kind": "holdout", "validation": 0.2}},
    "batch_size": 64,
    "lanes": LANES,
    "evaluate": {"every_steps": 500},
    "checkpoint": {"every": "30 seconds"},
    "export": [],
    "base_dir": str(HERE),
}


class Soak:
    """A run in a separate process, observed and disturbed by this one."""

    def __init__(self, scratch: Path, *, workers: int, seed: int) -> None:
        job = scratch / "job.yaml"
        job.write_text(yaml.safe_dump(JOB | {"steps": 10**8}))
        command = [sys.executable, "-m", "shoal", "run", str(job), "--quiet", "--workers", str(workers)]
        self.log = (scratch / "log").open("w")
        self.driver = psutil.Popen(
            [*command, "--runs", str(scratch / "runs")],
            env=environment() | {"SOAK_PAUSE_S": str(PAUSE_S)},
            stdout=self.log,
            stderr=self.log,
        )
        self.paths = RunPaths.at(scratch / "runs" / "soak-1")
        self.state = RunState()
        self.events: collections.Counter[str] = collections.Counter()
        self.faults: collections.Counter[str] = collections.Counter()
        self._reader = EventReader(self.paths.events)
        self._rng = random.Random(seed)
        self._workers = workers

    def poll_events(self) -> None:
        for event in self._reader.read_new():
            self.state.apply(event)
            self.events[event.kind] += 1

    def disturb(self) -> str:
        """Inject one of the four faults, at random."""
        self.poll_events()
        kind = self._rng.choice(["kill", "kill", "freeze", "join", "leave"])
        try:
            if kind in ("kill", "freeze"):
                worker = self._rng.choice(self.state.training_workers)
                os.kill(worker.pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
                kind = f"{kind} {worker.name}"
            else:
                self._workers = max(2, min(self._workers + (1 if kind == "join" else -1), 5))
                commands.scale(self.paths, self._workers)
        except (ProcessLookupError, IndexError, ShoalError) as missed:
            return f"{kind} failed: {missed}"
        self.faults[kind.split()[0]] += 1
        return kind

    def counts(self) -> dict[str, Any]:
        """Resources that the process tree uses now."""
        self.poll_events()
        driver = _used(self.driver)
        known = {worker.pid for worker in self.state.training_workers}
        workers = [_used(psutil.Process(pid)) for pid in known if psutil.pid_exists(pid)]
        return {
            "step": self.state.step,
            "driver": driver,
            "processes": len(self.driver.children(recursive=True)),
            "workers": len(workers),
            "worker_rss_mb": max((w["rss_mb"] for w in workers), default=0),
            "worker_fds": max((w["fds"] for w in workers), default=0),
            "worker_threads": max((w["threads"] for w in workers), default=0),
        }


def _used(process: psutil.Process) -> dict[str, float]:
    try:
        with process.oneshot():
            info = process.memory_full_info()
            return {"rss_mb": round(info.uss / 1e6, 1), "fds": process.num_fds(), "threads": process.num_threads()}
    except psutil.Error:
        return {"rss_mb": 0, "fds": 0, "threads": 0}


def quarters(samples: list[dict[str, Any]], key: str) -> list[float]:
    """The median of each quarter of the time."""
    values = [s["driver"][key.removeprefix("driver_")] if key.startswith("driver_") else s[key] for s in samples]
    size = max(len(values) // 4, 1)
    return [statistics.median(values[i * size : (i + 1) * size]) for i in range(4) if values[i * size : (i + 1) * size]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--every", type=float, default=10, help="seconds between two disturbances")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a directory for the run; a temporary one if none is named")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-soak-") as temporary:
        scratch = asked.keep or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        result = soak(scratch, asked)
    print(json.dumps(result, indent=1))
    if asked.minutes >= 1:
        (RESULTS / "soak.json").write_text(json.dumps(result, indent=1) + "\n")


def soak(scratch: Path, asked: argparse.Namespace) -> dict[str, Any]:
    one = Soak(scratch, workers=asked.workers, seed=asked.seed)
    while not one.state.training_workers:
        time.sleep(0.2)
        one.poll_events()
        assert one.driver.poll() is None, (scratch / "log").read_text()
    until, samples = time.monotonic() + 60 * asked.minutes, []
    while time.monotonic() < until and one.driver.poll() is None:
        time.sleep(asked.every)
        samples.append(one.counts())
        print(f"step {one.state.step}, {samples[-1]['workers']} workers: {one.disturb()}", flush=True)
    alive = one.driver.poll() is None
    if alive:
        commands.stop(one.paths)
        one.driver.wait()
    one.poll_events()
    step, weights = saved_weights(one.paths)
    keys = [
        "driver_rss_mb",
        "driver_fds",
        "driver_threads",
        "processes",
        "worker_rss_mb",
        "worker_fds",
        "worker_threads",
    ]
    return {
        "machine": machine(),
        "minutes": asked.minutes,
        "survived": alive,
        "steps": step,
        "faults": dict(one.faults),
        "evicted": one.events["evicted"],
        "deaths": one.state.deaths,
        "views": one.state.views,
        "back_to_a_checkpoint": one.events["resumed"],
        "quarters": {key: quarters(samples, key) for key in keys},
        "same_weights": reference_weights(scratch / "job.yaml", steps=step, runs=scratch / "runs") == weights,
    }


if __name__ == "__main__":
    main()
