"""python -m benchmarks.search overhead [--trials 20] [--steps 300] [--turns 3] [--sides shoal,optuna,ray]

What a trial costs beyond its training, side by side in one run: the same net, data, batches and number of steps. Shoal:
one worker, two slots, a fork server that is loaded. Optuna: `study.optimize` over a Journal file, in one process. Ray
Tune: one trial at a time in a cluster of one core that has started. The sides take turns, and each number is the
median over the turns.

`overhead s/trial` is the wall time of the search without the time in which trials trained: at Shoal from the first
step to the last evaluation, at the others that in the function. `beyond the function` is the wall time per trial
without that of Optuna's function, which is nothing but the loop of steps: it also counts what Shoal adds to steps.
`cpu s/trial` is the CPU time of all processes of the side (not told for Ray, whose daemons are not its children).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shoal.events import read_events
from shoal.fleet.forkserver import ForkServer
from shoal.jobs.fork_servers import make_fork_server, modules_to_preload
from shoal.jobs.probes import PROBE_MODULE
from shoal.jobs.search.driver import run_search
from shoal.jobs.search.search_dir import SearchPaths
from shoal.jobs.search.summary import read_search
from shoal.spec.job import Job
from shoal.spec.load import make_job

BATCH = 64
TRAIN_SAMPLES = 1437


def overhead_job(trials: int, steps: int) -> Job:
    return make_job(
        {
            "name": "overhead",
            "model": {"name": "benchmarks.search.net:digits_net", "args": {"hidden": 256, "layers": 2}},
            "loss": "CrossEntropyLoss",
            "metrics": ["accuracy"],
            "optimizer": {"name": "AdamW", "args": {"lr": 0.001}},
            "data": {"source": {"kind": "sklearn", "name": "digits"}, "split": "holdout"},
            "batch_size": BATCH,
            "steps": steps,
            "evaluate": {"every_steps": steps},
            "search": {
                "metric": "accuracy",
                "space": {"optimizer.args.lr": {"low": 1e-4, "high": 1e-2, "log": True}},
                "policy": {"kind": "full", "sampler": "random"},
                "budget": f"{trials} trials",
                "slots": 2,
            },
        }
    )


def cpu_s() -> float:
    """CPU time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def family_cpu_s(pid: int) -> float:
    """CPU time of a living process and of its children that have ended."""
    fields = Path("/proc", str(pid), "stat").read_text().rpartition(") ")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


# ---- Shoal ----


def training_s(paths: SearchPaths) -> float:
    """Seconds in which workers trained, over all trials."""
    total = 0.0
    for trial in read_search(paths).table.trials:
        events = list(read_events(paths.trial(trial).events))
        began = min(event.t for event in events if event.kind == "joined")
        total += max(event.t for event in events if event.kind == "evaluated") - began
    return total


class ShoalSide:
    """Searches with one fork server."""

    def __init__(self, fork_server: ForkServer, scratch: Path) -> None:
        self._fork_server, self._scratch, self._turns = fork_server, scratch, 0

    def run(self, trials: int, steps: int) -> dict[str, float]:
        self._turns += 1
        used_s = cpu_s() + self._forked_cpu_s()
        began_s = time.monotonic()
        outcome = run_search(
            overhead_job(trials, steps),
            runs=self._scratch / f"runs-{self._turns}",
            workers=1,
            fork_server=self._fork_server,
        )
        wall_s = time.monotonic() - began_s
        return _row(trials, wall_s, training_s(outcome.paths), cpu_s() + self._forked_cpu_s() - used_s)

    def _forked_cpu_s(self) -> float:
        process = self._fork_server._process
        return family_cpu_s(process.pid) if process else 0.0


@contextlib.contextmanager
def open_shoal(scratch: Path) -> Iterator[ShoalSide]:
    modules = [*modules_to_preload(overhead_job(1, 1)), PROBE_MODULE]
    with make_fork_server(1, modules=modules) as fork_server:
        yield ShoalSide(fork_server, scratch)


# ---- the function of the others ----


def make_function() -> Callable[[float, int], tuple[float, float]]:
    """Trains with a learning rate for so many steps. Returns the accuracy and its seconds."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn

    from benchmarks.search.net import digits_net

    torch.set_num_threads(1)
    digits = load_digits()
    inputs, target = torch.tensor(digits.data, dtype=torch.float32), torch.tensor(digits.target)

    def train(lr: float, steps: int) -> tuple[float, float]:
        began_s = time.monotonic()
        net = digits_net(256, 2)
        optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
        for step in range(steps):
            chosen = torch.arange(step * BATCH, (step + 1) * BATCH) % TRAIN_SAMPLES
            loss = nn.functional.cross_entropy(net(inputs[chosen]), target[chosen])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.no_grad():
            held = net(inputs[TRAIN_SAMPLES:]).argmax(1) == target[TRAIN_SAMPLES:]
        return float(held.float().mean()), time.monotonic() - began_s

    return train


class OptunaSide:
    def __init__(self, scratch: Path) -> None:
        self._scratch, self._turns, self._train = scratch, 0, make_function()

    def run(self, trials: int, steps: int) -> dict[str, float]:
        import optuna
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._turns += 1
        spent: list[float] = []

        def objective(trial: Any) -> float:
            accuracy, seconds = self._train(trial.suggest_float("lr", 1e-4, 1e-2, log=True), steps)
            spent.append(seconds)
            return accuracy

        storage = optuna.storages.JournalStorage(JournalFileBackend(str(self._scratch / f"journal-{self._turns}")))
        study = optuna.create_study(storage=storage, direction="maximize")
        began_s, used_s = time.monotonic(), cpu_s()
        study.optimize(objective, n_trials=trials)
        return _row(trials, time.monotonic() - began_s, sum(spent), cpu_s() - used_s)


@contextlib.contextmanager
def open_optuna(scratch: Path) -> Iterator[OptunaSide]:
    yield OptunaSide(scratch)


class RaySide:
    def __init__(self, scratch: Path) -> None:
        self._scratch, self._turns = scratch, 0

    def run(self, trials: int, steps: int) -> dict[str, float]:
        from ray import tune

        self._turns += 1

        def objective(config: dict[str, Any]) -> None:
            accuracy, seconds = make_function()(config["lr"], steps)
            tune.report({"accuracy": accuracy, "seconds": seconds})

        tuner = tune.Tuner(
            objective,
            param_space={"lr": tune.loguniform(1e-4, 1e-2)},
            tune_config=tune.TuneConfig(
                metric="accuracy", mode="max", num_samples=trials, max_concurrent_trials=1, reuse_actors=True
            ),
            run_config=tune.RunConfig(name=f"turn-{self._turns}", storage_path=str(self._scratch / "ray"), verbose=0),
        )
        began_s = time.monotonic()
        found = tuner.fit()
        wall_s = time.monotonic() - began_s
        spent = [(found[i].metrics or {})["seconds"] for i in range(len(found))]
        return _row(trials, wall_s, sum(spent), None)


@contextlib.contextmanager
def open_ray(scratch: Path) -> Iterator[RaySide]:
    from benchmarks.search.ray_cluster import ray_cluster

    with ray_cluster(cores=1, directory=scratch / "r"):
        yield RaySide(scratch)


# ---- all sides ----

SIDES: dict[str, Any] = {"shoal": open_shoal, "optuna": open_optuna, "ray": open_ray}


def _row(trials: int, wall_s: float, trained_s: float, used_s: float | None) -> dict[str, float]:
    row = {
        "wall s/trial": wall_s / trials,
        "training s/trial": trained_s / trials,
        "overhead s/trial": (wall_s - trained_s) / trials,
    }
    return row if used_s is None else row | {"cpu s/trial": used_s / trials}


def measure(sides: list[str], *, trials: int, steps: int, turns: int) -> list[dict[str, Any]]:
    """One row per side. Each first runs two trials that do not count."""
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory(prefix="shoal-search-") as scratch, contextlib.ExitStack() as stack:
        opened = {side: stack.enter_context(SIDES[side](Path(scratch))) for side in sides}
        for side in sides:
            opened[side].run(2, steps)
        for turn in range(turns):
            for side in sides if turn % 2 else reversed(sides):
                found[side].append(opened[side].run(trials, steps))
    rows: list[dict[str, Any]] = [
        {"side": side, "trials": trials, "turns": turns, **_medians(found[side])} for side in sides
    ]
    function_s = next((row["training s/trial"] for row in rows if row["side"] == "optuna"), None)
    if function_s is not None:
        rows = [{**row, "beyond the function": row["wall s/trial"] - function_s} for row in rows]
    return rows


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(row[name] for row in rows), 4) for name in rows[0]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--steps", type=int, default=600, help="of a trial; 600 take about a second")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--sides", default="shoal,optuna,ray")


def run(asked: argparse.Namespace) -> list[dict[str, Any]]:
    return measure(asked.sides.split(","), trials=asked.trials, steps=asked.steps, turns=asked.turns)
