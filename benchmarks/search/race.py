"""python -m benchmarks.search race --minutes 15 --sides shoal,optuna,ray --kill-every 0 60 [--data DIR] [--json]

A race on MNIST: the same net, space, training and validation samples, epochs and time for each side, one after the
other, with `--workers` processes of one thread each. Shoal searches with its default policy. Optuna runs TPE with
Hyperband pruning over a Journal file, a process per worker. Ray Tune runs ASHA with random values, and trials save a
checkpoint after every epoch.

The race is run once for each number of `--kill-every`. With one above 0, a process of the side gets `kill -9` in that
interval of seconds: two training processes, then the side's driver, and so on (Optuna has none). Whatever has ended is
started again as its documentation says: `shoal search resume`, another `study.optimize`, `Tuner.restore`. Told for each
side:

`after N s`: the best validation accuracy so far, at each third of the time. Every side logs each evaluation in the same
way, on the same samples. `test accuracy`: the net of the best values, trained again with the same plain loop to its end
(the mean over `--retrain` seeds), on MNIST's test samples. `trials`, `epochs` (evaluations that were done), `epochs
lost` (done again, or of a trial that nobody will finish), `zombies` (trials that count as running, nobody trains them),
`failed` trials, `driver starts`, `side ended by a kill` (times that the whole side had to be started again), `processes
left` (alive some seconds after the side was asked to end).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.search import race_sides
from benchmarks.search.race_sides import SIDES, Evaluation, Side
from benchmarks.search.ray_cluster import processes_with

MARK = "SHOAL_BENCHMARK_RACE"
END_S = 20.0
TICK_S = 0.2


@dataclass
class SideRun:
    """The processes of one side, from its start to its end."""

    side: Side
    command: list[str]
    processes: int
    scratch: Path
    began_s: float = field(default_factory=time.monotonic)
    drivers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    starts: int = 0
    kills: int = 0
    ended_by_kills: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def keep_alive(self) -> None:
        """Start what does not run. A driver that was not killed and ends early says why in its log."""
        for i in range(self.processes):
            if i < len(self.drivers) and self.drivers[i].poll() is None:
                continue
            log = open(self.scratch / f"driver-{i}.log", "ab")  # noqa: SIM115
            resume = ["--resume"] if self.starts >= self.processes else []
            if resume and self.side.cleans_up:
                self.kill_marked()
            made = subprocess.Popen(
                [*self.command, *resume],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=os.environ | {MARK: str(self.scratch)},
                start_new_session=True,
            )
            log.close()
            self.drivers[i:] = [made, *self.drivers[i + 1 :]]
            self.starts += 1

    def kill_one(self) -> bool:
        """Two training processes, then a driver, and so on. Returns whether there was one to kill."""
        trainers = sorted(set(self.side.trainers(self.scratch)) & set(self.marked()))
        living = [driver.pid for driver in self.drivers if driver.poll() is None]
        at_driver = self.side.has_driver and self.kills % 3 == 2
        chosen = living if at_driver or not self.side.has_driver else trainers
        if not chosen:
            return False
        try:
            os.kill(self.rng.choice(chosen), signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.kills += 1
        self.ended_by_kills += at_driver
        return True

    def marked(self) -> list[int]:
        return processes_with(MARK, str(self.scratch))

    def end(self) -> int:
        """Ask the drivers to end. Returns how many processes are left after a while; those are killed."""
        for driver in self.drivers:
            if driver.poll() is None:
                driver.send_signal(self.side.end_signal)
        deadline_s = time.monotonic() + END_S
        while time.monotonic() < deadline_s and self.marked():
            for driver in self.drivers:
                driver.poll()
            time.sleep(TICK_S)
        left = self.kill_marked()
        for driver in self.drivers:
            driver.wait()
        return left

    def kill_marked(self) -> int:
        """Kill every process of the side. Returns how many there were."""
        found = self.marked()
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(found)


def run_side(name: str, asked: argparse.Namespace, data: Path, scratch: Path, *, kill_every_s: float) -> dict[str, Any]:
    side = SIDES[name]
    side.prepare(scratch, data=data, workers=asked.workers)
    command = [sys.executable, "-m", "benchmarks.search.race_sides", name, "--scratch", str(scratch)]
    command += ["--data", str(data), "--workers", str(asked.workers)]
    run = SideRun(side, command, 1 if side.has_driver else asked.workers, scratch)
    began_t, next_kill_s = time.time(), kill_every_s or float("inf")
    while (now_s := time.monotonic() - run.began_s) < asked.minutes * 60:
        run.keep_alive()
        if now_s >= next_kill_s and run.kill_one():
            next_kill_s = now_s + kill_every_s
        time.sleep(TICK_S)
    left = run.end()
    seen = [one for one in side.evaluations(scratch) if one.t - began_t <= asked.minutes * 60]
    told = side.counts(scratch, living=asked.workers)
    row = {
        "side": name,
        "kill every s": kill_every_s,
        **{f"after {mark:.0f} s": best_until(seen, began_t + mark) for mark in marks(asked.minutes)},
        "trials": told.trials,
        "epochs": len(seen),
        "epochs lost": epochs_lost(seen, told.zombies),
        "zombies": len(told.zombies),
        "failed": told.failed,
        "kills": run.kills,
        "driver starts": run.starts,
        "side ended by a kill": run.ended_by_kills,
        "processes left": left,
    }
    best = max(seen, key=lambda one: one.value, default=None)
    if best is not None and asked.retrain:
        row["test accuracy"] = race_sides.retrain(best.values, data, seeds=asked.retrain)
    if not seen:
        row["driver log"] = (scratch / "driver-0.log").read_text(errors="replace")[-2000:]
    return row | {"best values": {} if best is None else dict(best.values), "curve": curve(seen, began_t)}


def marks(minutes: float) -> list[float]:
    return [minutes * 60 * part / 3 for part in (1, 2, 3)]


def best_until(seen: Sequence[Evaluation], t: float) -> float:
    return round(max((one.value for one in seen if one.t <= t), default=0.0), 5)


def epochs_lost(seen: Sequence[Evaluation], zombies: Sequence[str]) -> int:
    again = len(seen) - len({(one.trial, one.epoch) for one in seen})
    return again + len({(one.trial, one.epoch) for one in seen if one.trial in zombies})


def curve(seen: Sequence[Evaluation], began_t: float) -> list[tuple[float, float]]:
    """(seconds, value) of each new best value."""
    found: list[tuple[float, float]] = []
    for one in sorted(seen, key=lambda one: one.t):
        if not found or one.value > found[-1][1]:
            found.append((round(one.t - began_t, 1), round(one.value, 5)))
    return found


def find_data() -> Path:
    """`shared/datasets/mnist` beside a directory above this file, or `datasets/mnist` here."""
    places = [parent / "shared/datasets/mnist" for parent in Path(__file__).resolve().parents]
    return next((place for place in places if place.is_dir()), Path("datasets/mnist"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, default=find_data(), help="a directory with MNIST's four IDX files")
    parser.add_argument("--minutes", type=float, default=15.0, help="for each side")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=18_000, help="training samples; 6,000 others validate")
    parser.add_argument("--kill-every", type=float, nargs="+", default=[0.0], help="seconds between kills; 0: none")
    parser.add_argument("--retrain", type=int, default=1, help="seeds with which the best values are trained again")
    parser.add_argument("--sides", default="shoal,optuna,ray")


def run(asked: argparse.Namespace) -> list[dict[str, Any]]:
    names = asked.sides.split(",")
    for name in names:
        SIDES[name].check()
    rows = []
    with tempfile.TemporaryDirectory(prefix="race-") as directory:
        data = race_sides.write_data(asked.data, Path(directory), samples=asked.samples)
        for number, (kill_every_s, name) in enumerate(itertools.product(asked.kill_every, names)):
            scratch = Path(directory, f"{name}-{number}")
            scratch.mkdir()
            row = run_side(name, asked, data, scratch, kill_every_s=kill_every_s)
            rows.append({**row, "minutes": asked.minutes, "workers": asked.workers})
            print(json.dumps({k: v for k, v in rows[-1].items() if k != "curve"}), file=sys.stderr, flush=True)
    return rows
