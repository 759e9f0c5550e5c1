"""The sides of the race: their drivers, which `race` starts as processes, and what each leaves on disk.

`python -m benchmarks.search.race_sides SIDE --scratch DIR --data FILE [--resume]` runs until it is asked to end.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shoal.events import read_events
from shoal.fleet.orphans import locked_seats
from shoal.jobs.search import search_dir
from shoal.jobs.search.search_dir import SearchPaths
from shoal.jobs.search.summary import read_search
from shoal.spec.load import make_job, save_job

EPOCHS = 9
VALIDATION = 6_000
WIDTHS, BATCHES = [4, 8, 16, 32], [32, 64, 128, 256]
LOW_LR, HIGH_LR, HIGH_DROPOUT = 1e-4, 1e-1, 0.6
LOG = "evaluations.jsonl"
FOREVER_H = 10_000.0


@dataclass(frozen=True)
class Evaluation:
    """One epoch of a trial: when, and the validation accuracy after it. `values`: lr, width, dropout, batch_size."""

    t: float
    trial: str
    epoch: int
    value: float
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Counts:
    """`zombies`: names of trials that count as running although nobody trains them."""

    trials: int
    zombies: Sequence[str] = ()
    failed: int = 0


class Side(Protocol):
    """How one tool is prepared, driven and read. `has_driver`: one process that is not a training process drives.
    `cleans_up`: what a killed driver left is killed before the next one starts."""

    has_driver: bool
    cleans_up: bool
    end_signal: signal.Signals

    def check(self) -> None: ...

    def prepare(self, scratch: Path, *, data: Path, workers: int) -> None: ...

    def drive(self, asked: argparse.Namespace) -> None: ...

    def trainers(self, scratch: Path) -> list[int]: ...

    def evaluations(self, scratch: Path) -> list[Evaluation]: ...

    def counts(self, scratch: Path, *, living: int) -> Counts: ...


# ---- data, and the plain loop ----


def read_idx(path: Path, header: int) -> np.ndarray:
    with gzip.open(path) as file:
        return np.frombuffer(file.read(), np.uint8, offset=header)


def write_data(mnist: Path, directory: Path, *, samples: int) -> Path:
    """Training, validation and test samples for all sides, as one array file each: DIR/{train,validation,test}.npz."""
    names = {"train": "train", "test": "t10k"}
    if missing := [n for n in names.values() if not (mnist / f"{n}-images-idx3-ubyte.gz").is_file()]:
        raise SystemExit(f"{mnist} has no {missing[0]}-images-idx3-ubyte.gz: give a directory with --data")
    arrays = {}
    for part, name in names.items():
        images = read_idx(mnist / f"{name}-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28).astype(np.float32) / 255
        arrays[part] = images, read_idx(mnist / f"{name}-labels-idx1-ubyte.gz", 8).astype(np.int64)
    images, labels = arrays["train"]
    order = np.random.default_rng(0).permutation(len(images))
    held, kept = order[:VALIDATION], order[VALIDATION : VALIDATION + samples]
    for part, (x, y) in {
        "train": (images[kept], labels[kept]),
        "validation": (images[held], labels[held]),
        "test": arrays["test"],
    }.items():
        np.savez(directory / f"{part}.npz", x=x, y=y)
    return directory


def load_part(data: Path, part: str) -> tuple[Any, Any]:
    import torch

    with np.load(data / f"{part}.npz") as file:
        return torch.from_numpy(file["x"]), torch.from_numpy(file["y"])


class PlainTraining:
    """The loop that a user of the other tools writes."""

    def __init__(self, values: Mapping[str, Any], data: Path, *, seed: int | None = None) -> None:
        import torch

        from benchmarks.search.net import mnist_net

        torch.set_num_threads(1)
        if seed is not None:
            torch.manual_seed(seed)
        self.train = load_part(data, "train")
        self.batch_size = int(values["batch_size"])
        self.net = mnist_net(int(values["width"]), float(values["dropout"]))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=float(values["lr"]))

    def run_epoch(self) -> None:
        import torch
        from torch import nn

        images, labels = self.train
        self.net.train()
        for chosen in torch.randperm(len(images)).split(self.batch_size):  # type: ignore[no-untyped-call]
            loss = nn.functional.cross_entropy(self.net(images[chosen]), labels[chosen])
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()

    def accuracy(self, held: tuple[Any, Any]) -> float:
        import torch

        self.net.eval()
        with torch.no_grad():
            outputs = torch.cat([self.net(part) for part in held[0].split(500)])
        return float((outputs.argmax(1) == held[1]).float().mean())


def retrain(values: Mapping[str, Any], data: Path, *, seeds: int) -> float:
    """The mean test accuracy of these values after all epochs, over so many seeds."""
    test, found = load_part(data, "test"), []
    for seed in range(seeds):
        training = PlainTraining(values, data, seed=seed)
        for _ in range(EPOCHS):
            training.run_epoch()
        found.append(training.accuracy(test))
    return round(sum(found) / len(found), 5)


def log_row(scratch: Path, **fields: Any) -> None:
    """Append a row with one call."""
    row = json.dumps({"t": time.time(), "pid": os.getpid(), **fields}).encode() + b"\n"
    number = os.open(scratch / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(number, row)
    finally:
        os.close(number)


def read_log(scratch: Path) -> list[dict[str, Any]]:
    file = scratch / LOG
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def logged_evaluations(scratch: Path) -> list[Evaluation]:
    rows = [row for row in read_log(scratch) if "epoch" in row]
    return [Evaluation(r["t"], r["trial"], r["epoch"], r["value"], r["values"]) for r in rows]


def require(package: str, install: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise SystemExit(f"{package} is not installed: pip install '{install}'")


# ---- Shoal ----


class ShoalSide:
    has_driver, cleans_up, end_signal = True, False, signal.SIGTERM

    def check(self) -> None:
        pass

    def prepare(self, scratch: Path, *, data: Path, workers: int) -> None:
        """The job file of the search; its own hours never end it."""
        job = make_job(
            {
                "name": "race",
                "model": {"name": "benchmarks.search.net:mnist_net", "args": {"width": 16, "dropout": 0.2}},
                "loss": "CrossEntropyLoss",
                "metrics": ["accuracy"],
                "optimizer": {"name": "AdamW", "args": {"lr": 0.001}},
                "data": {
                    "source": {"kind": "npz", "path": str(data / "train.npz")},
                    "validation": {"kind": "npz", "path": str(data / "validation.npz")},
                },
                "batch_size": 64,
                "evaluate": {"batch_size": 500},
                "epochs": EPOCHS,
                "lanes": 2,
                "search": {
                    "metric": "accuracy",
                    "space": {
                        "optimizer.args.lr": {"low": LOW_LR, "high": HIGH_LR, "log": True},
                        "model.args.width": WIDTHS,
                        "model.args.dropout": {"low": 0.0, "high": HIGH_DROPOUT},
                        "batch_size": BATCHES,
                    },
                    "budget": {"hours": FOREVER_H},
                    "slots": 2 * workers,
                },
            }
        )
        save_job(job, scratch / "job.yaml")

    def drive(self, asked: argparse.Namespace) -> None:
        from shoal import cli

        runs = asked.scratch / "runs"
        what = ["resume", "last"] if self._paths(asked.scratch) else [str(asked.scratch / "job.yaml")]
        sys.argv = ["shoal", "search", *what, "--runs", str(runs), "--workers", str(asked.workers), "-q"]
        cli.main()

    def _paths(self, scratch: Path) -> SearchPaths | None:
        with contextlib.suppress(Exception):
            return search_dir.find("last", scratch / "runs")
        return None

    def trainers(self, scratch: Path) -> list[int]:
        """Workers of all trials, as the locks of their seats name them."""
        paths, pids = self._paths(scratch), []
        for trial in paths.root.glob("trial-*") if paths else ():
            run = paths.trial(int(trial.name[6:])) if paths else None
            for seat in locked_seats(run) if run else ():
                with contextlib.suppress(OSError, ValueError):
                    pids.append(int(run.seat_lock(seat.number, seat.role).read_text()))  # type: ignore[union-attr]
        return pids

    def evaluations(self, scratch: Path) -> list[Evaluation]:
        paths = self._paths(scratch)
        if paths is None:
            return []
        found = []
        for trial in read_search(paths).table.trials.values():
            changes = trial.changes
            values = {
                "lr": changes["optimizer.args.lr"],
                "width": changes["model.args.width"],
                "dropout": changes["model.args.dropout"],
                "batch_size": changes["batch_size"],
            }
            events = paths.trial(trial.number).events
            for event in read_events(events) if events.is_file() else ():
                if event.kind == "evaluated" and not event.fields.get("again") and event.step is not None:
                    accuracy = float(event["metrics"]["accuracy"])
                    found.append(Evaluation(event.t, str(trial.number), event.step, accuracy, values))
        return found

    def counts(self, scratch: Path, *, living: int) -> Counts:
        """A trial that runs when the side ends is resumed by the next driver: it is a zombie only if it cannot be."""
        paths = self._paths(scratch)
        if paths is None:
            return Counts(0)
        trials = read_search(paths).table.trials.values()
        zombies = [str(t.number) for t in trials if t.state == "running" and locked_seats(paths.trial(t.number))]
        return Counts(len(trials), zombies, sum(t.state == "failed" for t in trials))


# ---- Optuna ----


class OptunaSide:
    has_driver, cleans_up, end_signal = False, False, signal.SIGKILL

    def check(self) -> None:
        require("optuna", "optuna>=5")

    def prepare(self, scratch: Path, *, data: Path, workers: int) -> None:
        self._study(scratch)

    def _study(self, scratch: Path) -> Any:
        import optuna
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        return optuna.create_study(
            study_name="race",
            storage=optuna.storages.JournalStorage(JournalFileBackend(str(scratch / "journal"))),
            direction="maximize",
            pruner=optuna.pruners.HyperbandPruner(min_resource=1, max_resource=EPOCHS, reduction_factor=3),
            load_if_exists=True,
        )

    def drive(self, asked: argparse.Namespace) -> None:
        import optuna

        held = load_part(asked.data, "validation")

        def objective(trial: Any) -> float:
            values = {
                "lr": trial.suggest_float("lr", LOW_LR, HIGH_LR, log=True),
                "width": trial.suggest_categorical("width", WIDTHS),
                "dropout": trial.suggest_float("dropout", 0.0, HIGH_DROPOUT),
                "batch_size": trial.suggest_categorical("batch_size", BATCHES),
            }
            training, value = PlainTraining(values, asked.data), 0.0
            for epoch in range(1, EPOCHS + 1):
                training.run_epoch()
                value = training.accuracy(held)
                log_row(asked.scratch, trial=str(trial.number), epoch=epoch, value=value, values=values)
                trial.report(value, epoch)
                if trial.should_prune():
                    raise optuna.TrialPruned
            return value

        self._study(asked.scratch).optimize(objective, catch=(RuntimeError,))

    def trainers(self, scratch: Path) -> list[int]:
        return []

    def evaluations(self, scratch: Path) -> list[Evaluation]:
        return logged_evaluations(scratch)

    def counts(self, scratch: Path, *, living: int) -> Counts:
        """The newest running trials are those that the end of the race has cut off: they are not counted."""
        trials = self._study(scratch).trials
        running = [str(t.number) for t in trials if t.state.name == "RUNNING"]
        return Counts(
            len(trials), running[: max(len(running) - living, 0)], sum(t.state.name == "FAIL" for t in trials)
        )


# ---- Ray Tune ----


def ray_objective(values: dict[str, Any]) -> None:
    """Trains with a checkpoint after every epoch, and continues from the newest one."""
    import torch
    from ray import tune

    data, scratch = Path(values["data"]), Path(values["scratch"])
    own = {name: values[name] for name in ("lr", "width", "dropout", "batch_size")}
    trial = str(tune.get_context().get_trial_id())
    log_row(scratch, trial=trial)
    training, held, done = PlainTraining(own, data), load_part(data, "validation"), 0
    if (saved := tune.get_checkpoint()) is not None:
        with saved.as_directory() as directory:
            state = torch.load(Path(directory, "state.pt"))
        training.net.load_state_dict(state["net"])
        training.optimizer.load_state_dict(state["optimizer"])
        done = int(state["epoch"])
    for epoch in range(done + 1, EPOCHS + 1):
        training.run_epoch()
        value = training.accuracy(held)
        log_row(scratch, trial=trial, epoch=epoch, value=value, values=own)
        _ray_report(training, epoch, value)


def _ray_report(training: PlainTraining, epoch: int, value: float) -> None:
    import tempfile

    import torch
    from ray import tune

    with tempfile.TemporaryDirectory() as directory:
        state = {"net": training.net.state_dict(), "optimizer": training.optimizer.state_dict(), "epoch": epoch}
        torch.save(state, Path(directory, "state.pt"))
        tune.report({"accuracy": value}, checkpoint=tune.Checkpoint.from_directory(directory))


class RaySide:
    has_driver, cleans_up, end_signal = True, True, signal.SIGINT
    folder = "tune/race"

    def check(self) -> None:
        require("ray", "ray[tune]")

    def prepare(self, scratch: Path, *, data: Path, workers: int) -> None:
        pass

    def drive(self, asked: argparse.Namespace) -> None:
        from benchmarks.search.ray_cluster import ray_cluster

        with ray_cluster(cores=asked.workers, directory=asked.scratch / "r"):
            self._tuner(asked).fit()

    def _tuner(self, asked: argparse.Namespace) -> Any:
        from ray import tune

        folder = asked.scratch / self.folder
        if asked.resume and tune.Tuner.can_restore(str(folder)):
            return tune.Tuner.restore(str(folder), trainable=ray_objective, resume_unfinished=True, resume_errored=True)
        space = {
            "lr": tune.loguniform(LOW_LR, HIGH_LR),
            "width": tune.choice(WIDTHS),
            "dropout": tune.uniform(0.0, HIGH_DROPOUT),
            "batch_size": tune.choice(BATCHES),
            "data": str(asked.data),
            "scratch": str(asked.scratch),
        }
        scheduler = tune.schedulers.ASHAScheduler(max_t=EPOCHS, grace_period=1, reduction_factor=3)
        return tune.Tuner(
            tune.with_resources(ray_objective, {"cpu": 1}),
            param_space=space,
            tune_config=tune.TuneConfig(metric="accuracy", mode="max", num_samples=-1, scheduler=scheduler),
            run_config=tune.RunConfig(
                name=folder.name,
                storage_path=str(folder.parent),
                failure_config=tune.FailureConfig(max_failures=10),
                checkpoint_config=tune.CheckpointConfig(num_to_keep=1),
                verbose=0,
            ),
        )

    def trainers(self, scratch: Path) -> list[int]:
        return sorted({row["pid"] for row in read_log(scratch)})

    def evaluations(self, scratch: Path) -> list[Evaluation]:
        return logged_evaluations(scratch)

    def counts(self, scratch: Path, *, living: int) -> Counts:
        """Trials as the newest state file of the experiment has them."""
        rows = read_log(scratch)
        seen = {row["trial"] for row in rows}
        states = sorted((scratch / self.folder).glob("experiment_state-*.json"), key=lambda file: file.stat().st_mtime)
        if not states:
            return Counts(len(seen), sorted(seen))
        kept = [json.loads(one[0] if isinstance(one, list) else one) for one in _trial_data(states[-1])]
        status = {str(one["trial_id"]): str(one["status"]) for one in kept}
        lost = sorted(seen - set(status))  # begun, and forgotten by the restored experiment
        return Counts(len(seen), lost, sum(state == "ERROR" for state in status.values()))


def _trial_data(file: Path) -> list[Any]:
    return list(json.loads(file.read_text()).get("trial_data", []))


SIDES: dict[str, Side] = {"shoal": ShoalSide(), "optuna": OptunaSide(), "ray": RaySide()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search.race_sides", description=__doc__)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    asked = parser.parse_args()
    SIDES[asked.side].drive(asked)


if __name__ == "__main__":
    main()
