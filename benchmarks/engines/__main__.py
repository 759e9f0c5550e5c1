"""`python -m benchmarks.engines [local apart ssh slurm ray]`: submit to first step, kill, replacement and drain of a
worker; `--rivals` measures torchrun, `srun torchrun` and Ray Train (`pip install 'ray[train]'`) beside them.

`ssh`, `slurm` and `ray` start an sshd, three slurmd or two nodes of Ray on this machine, as the tests do. Or use your
own: --hosts and --config for ssh, --own-slurm for the cluster that `srun` finds, --address for Ray.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.engines.rivals import measure_rival
from benchmarks.report import keep, table, take_names
from shoal.events import Event, RunState
from shoal.jobs import run_executor
from shoal.jobs.fork_servers import ForkServerPool
from shoal.spec.load import make_job
from shoal.spec.run_paths import RunPaths

ENGINES = ("local", "apart", "ssh", "slurm", "ray")
RIVAL_OF = {"local": "torchrun", "slurm": "srun torchrun", "ray": "ray train"}
"""The rival that starts workers in the same way."""
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
COLUMNS = (
    "submit to first step",
    "kill to next step of the others",
    "kill to replacement joined",
    "SIGTERM to left",
)


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


@contextlib.contextmanager
def cluster(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The engine section of a job. What is missing for it is started on this machine, and ended afterwards."""
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-engines-")))
        if name == "ssh":
            config, hosts = options.config, options.hosts.split(",")
            if not options.hosts:
                config, hosts = (
                    str(stack.enter_context(_test_cluster("ssh_server").ssh_server(place)).config),
                    ["n1", "n2"],
                )
            yield {"kind": "ssh", "hosts": hosts, "python": sys.executable, "config": config}
        elif name == "slurm":
            if not options.own_slurm:
                os.environ.update(stack.enter_context(_test_cluster("slurm_cluster").slurm_cluster(place)).environment)
            yield {"kind": "slurm"}
        elif name == "ray":
            made = _test_cluster("ray_nodes")
            os.environ.update({} if options.address else made.ENVIRONMENT)
            address = options.address or stack.enter_context(made.ray_nodes(2, place / "log")).address
            yield {"kind": "ray", "address": address}
        else:
            yield {"kind": "local", "apart": name == "apart", "machines": 2 if name == "apart" else 1}


def _test_cluster(name: str) -> Any:
    """The clusters of the tests, which need a checkout of the project."""
    return importlib.import_module(f"tests.fleet.{name}")


def measure_all(name: str, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Turns of the engine and, if asked for, of its rival, one after the other."""
    rival = RIVAL_OF.get(name) if options.rivals else None
    found: dict[str, list[dict[str, float]]] = {name: [], **({rival: []} if rival else {})}
    with cluster(name, options) as engine:
        for _ in range(options.turns):
            found[name].append(measure(engine))
            if rival:
                found[rival].append(measure_rival(rival, address=engine.get("address", "auto")))
    return found


def _median(what: str, turns: list[dict[str, float]]) -> float | str:
    """A rival restarts all its workers, so it has neither a replacement nor a leave."""
    return statistics.median(turn[what] for turn in turns) if what in turns[0] else "–"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.engines", description=__doc__)
    take_names(parser, "engine", ENGINES)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--hosts", default="", help="hosts for ssh, separated by commas")
    parser.add_argument("--config", help="a file for ssh -F")
    parser.add_argument("--own-slurm", action="store_true", help="the cluster that srun finds")
    parser.add_argument("--address", default="", help="of a cluster of Ray on this machine")
    parser.add_argument("--rivals", action="store_true", help="also torchrun, srun torchrun and Ray Train")
    options = parser.parse_args()
    names = options.engines or ["local", "apart"]
    rows: list[dict[str, Any]] = []
    for name in names:
        for what, turns in measure_all(name, options).items():
            keep("engines", what, {"turns": turns, "load": os.getloadavg()[0]})  # also if a later one fails
            rows.append({"engine": what, **{column: _median(column, turns) for column in COLUMNS}})
    Console().print(table("seconds, median", rows))


if __name__ == "__main__":
    main()
