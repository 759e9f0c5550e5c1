"""`python -m benchmarks.engines [local apart ssh slurm ray]`: submit to first step, kill, replacement and drain of a
worker.

`ssh` needs an ssh configuration whose hosts are given with --config and --hosts; a loopback sshd will do. `slurm` and
`ray` need a cluster on this machine: `srun` finds the one, --address names the other.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.report import keep, table, take_names
from shoal.events import Event, RunState
from shoal.jobs import run_executor
from shoal.jobs.fork_servers import ForkServerPool
from shoal.spec.load import make_job
from shoal.spec.run_paths import RunPaths

ENGINES = ("local", "apart", "ssh", "slurm", "ray")
JOB: dict[str, Any] = {
    "name": "engines",
    "model": {"name": "model.py:model"},
    "loss": "CrossEntropyLoss",
    "optimizer": {"name": "SGD", "args": {"lr": 0.05}},
    "data": {"source": {"kind": "sklearn", "name": "digits"}},
    "batch_size": 64,
    "steps": 10**6,
    "lanes": 2,
    "workers": 2,
    "checkpoint": {"every": "never"},
    "export": [],
}
MODEL = (
    "from torch import nn\ndef model():\n    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))\n"
)
SETTLE_STEPS = 200


class Stopwatch:
    """Kills a worker, waits for its replacement, drains one, then stops the run. Times are seconds of events."""

    def __init__(self) -> None:
        self.submitted_s = time.time()
        self.found: dict[str, float] = {}
        self._acted_s = 0.0
        self._after_step = 0
        self._phase = "first step"
        self._gone: set[str] = set()

    def on_event(self, paths: RunPaths, event: Event, state: RunState) -> str | None:
        if event.kind == "step" and self._phase == "first step":
            self._note("submit to first step", event.t - self.submitted_s, "both")
        training = [worker for worker in state.training_workers if worker.name not in self._gone]
        both_train = len(training) >= 2 and event.kind == "step" and (event.step or 0) > self._after_step
        if self._phase == "both" and both_train:
            self._signal(training[-1], signal.SIGKILL, "killed", state)
        elif self._phase == "killed" and event.kind == "view" and _goes_on_without(self._gone, event):
            self._phase = "noticed"  # a step that was under way does not count
        elif self._phase == "noticed" and event.kind == "step":
            self._note("kill to next step of the others", event.t - self._acted_s, "replaced")
        elif (
            self._phase == "replaced" and event.kind == "joined" and event.who not in self._gone and len(training) >= 2
        ):
            self._note("kill to replacement joined", event.t - self._acted_s, "drain")
            self._after_step = state.step + SETTLE_STEPS
        elif self._phase == "drain" and both_train:
            self._signal(training[-1], signal.SIGTERM, "left", state)
        elif self._phase == "left" and event.kind == "left":
            self._note("SIGTERM to left", event.t - self._acted_s, "done")
            return "measured"
        return None

    def _signal(self, worker: Any, number: int, phase: str, state: RunState) -> None:
        self._acted_s, self._phase, self._after_step = time.time(), phase, state.step
        self._gone.add(worker.name)
        os.kill(worker.pid, number)

    def _note(self, what: str, seconds: float, phase: str) -> None:
        self.found[what], self._phase = seconds, phase


def _goes_on_without(gone: set[str], view: Event) -> bool:
    carries = set(view.fields.get("carries", ()))
    return bool(carries) and not gone & carries


def measure(engine: dict[str, Any]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as directory, ForkServerPool() as fork_servers:
        (Path(directory) / "model.py").write_text(MODEL)
        job = make_job(JOB | {"engine": engine}, base_dir=directory)
        watch = Stopwatch()
        with run_executor.RunExecutor(fork_servers) as executor:
            handle = executor.submit(job, runs=Path(directory) / "runs", on_event=watch.on_event)
            executor.run_until_done(handle)
            result = handle.result()
        if result.status != "measured":
            raise SystemExit(f"{engine}: {result.error or result.status}")
    return watch.found


def engine_of(name: str, options: argparse.Namespace) -> dict[str, Any]:
    if name == "ssh":
        hosts = options.hosts.split(",")
        return {"kind": "ssh", "hosts": hosts, "python": sys.executable, "config": options.config}
    if name == "slurm":
        return {"kind": "slurm"}
    if name == "ray":
        return {"kind": "ray", "address": options.address}
    return {"kind": "local", "apart": name == "apart", "machines": 2 if name == "apart" else 1}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.engines", description=__doc__)
    take_names(parser, "engine", ENGINES)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--hosts", default="", help="hosts for ssh, separated by commas")
    parser.add_argument("--config", help="a file for ssh -F")
    parser.add_argument("--address", default="auto", help="of a cluster of Ray on this machine")
    options = parser.parse_args()
    names = options.engines or ["local", "apart"]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(options.turns):
        for name in names:
            found[name].append(measure(engine_of(name, options)))
    rows = [
        {"engine": name} | {what: statistics.median(turn[what] for turn in turns) for what in turns[0]}
        for name, turns in found.items()
    ]
    for row, turns in zip(rows, found.values(), strict=True):
        keep("engines", str(row["engine"]), {"turns": turns, "load": os.getloadavg()[0]})
    Console().print(table("seconds, median", rows))


if __name__ == "__main__":
    main()
