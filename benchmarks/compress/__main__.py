"""python -m benchmarks.compress [row ...] --mnist DIR --text FILE [--seeds N] [--first-seed K] [--rivals] [--keep]

`--keep` stores after each seed. Stored seeds that are not measured again stay: with `--first-seed 1`, seed 0.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import report
from benchmarks.compress import shrinking
from shoal.fleet.forkserver import ForkServer
from shoal.jobs import run_executor
from shoal.jobs.compression.compress import CompressRequest, compress
from shoal.jobs.fork_servers import make_fork_server, modules_to_preload
from shoal.spec.compression.config import CompressConfig
from shoal.spec.compression.measured import CompressionReport
from shoal.spec.job import Job
from shoal.spec.load import make_job
from shoal.spec.run_paths import RunPaths

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Trial:
    """One row: a model, how it is trained, and what is asked for."""

    model: str
    epochs: int
    compress: dict[str, Any]
    optimizer: dict[str, Any] = field(default_factory=lambda: {"name": "Adam", "args": {"lr": 1e-3}})
    data: str = "mnist"
    metric: str = "accuracy"
    workers: int = 1

    @property
    def batch_size(self) -> int:
        return 128 if self.data == "mnist" else 32


PROBES = "shoal.train.compression.actions"
"""What the processes of a compression import, besides what workers do."""
PROXIMAL = {"name": "shoal.compression:ProximalAdam", "args": {"lr": 0.002, "shrink": 1.0}}
TRIALS = {
    "digits-lossless": Trial("Digits", 60, {"steps": ["lossless"]}, PROXIMAL, data="digits"),
    "digits-lossless-plain": Trial("Digits", 60, {"steps": ["lossless"]}, data="digits"),
    "lenet300-size": Trial(
        "LeNet300",
        12,
        {"steps": ["pack"], "max_drop": 0.004, "tune": {"epochs": 4, "lr": 1.0}, "target": {"size": 1 / 40}},
    ),
    "lenet300-smaller": Trial(
        "LeNet300",
        12,
        {"steps": ["pack"], "max_drop": 0.006, "tune": {"epochs": 6, "lr": 1.0}, "target": {"size": 1 / 70}},
        workers=2,
    ),
    "lenet5-size": Trial(
        "LeNet5",
        4,
        {"steps": ["pack"], "max_drop": 0.004, "tune": {"epochs": 2, "lr": 1.0}, "target": {"size": 1 / 39}},
        workers=2,
    ),
    "cnn-int8": Trial("Cnn", 4, {"steps": ["int8"], "max_drop": 0.006}, workers=2),
    "cnn-fast": Trial(
        "Cnn",
        3,
        {
            "steps": ["int8", "prune"],
            "max_drop": 0.006,
            "tune": {"epochs": 2, "lr": 1.0, "teacher": False},
            "target": {"size": 1 / 6},
        },
        workers=2,
    ),
    "gpt": Trial(
        "Gpt",
        2,
        {
            "steps": ["int8", "prune"],
            "max_drop": 0.015,
            "tune": {"epochs": 1, "lr": 0.5, "teacher": False},
            "target": {"size": 0.2},
        },
        {"name": "AdamW", "args": {"lr": 0.002, "weight_decay": 0.1}},
        data="text",
        metric="loss",
        workers=2,
    ),
}


RIVALLED = ("digits-lossless", "lenet300-size", "lenet5-size", "cnn-fast", "gpt")
"""Rows with models of their own."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.compress")
    report.take_names(parser, "row", [*TRIALS, *shrinking.SHRINKS])
    parser.add_argument("--mnist", type=Path, default=Path("mnist"), help="the directory of MNIST's four files")
    parser.add_argument("--text", type=Path, default=Path("input.txt"), help="the text that the GPT learns")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="measure from this seed on; stored others stay")
    parser.add_argument("--keep", action="store_true", help="store the results beside those of other benchmarks")
    parser.add_argument("--rivals", action="store_true", help="other tools on the parents of these rows instead")
    asked = parser.parse_args()
    if asked.rivals:
        measure_rivals(asked)
        return
    for name in asked.rows or [*TRIALS, *shrinking.SHRINKS]:
        earlier = report.kept("compress").get(name, {}).get("seeds", [])
        found = {row["seed"]: row for row in earlier}
        for seed in range(asked.first_seed, asked.seeds):
            found[seed] = measure_row(name, asked, seed)
            rows = [found[one] for one in sorted(found)]
            if asked.keep:
                report.keep("compress", name, {"command": f"python -m benchmarks.compress {name}", "seeds": rows})
        Console().print(report.table(name, [{k: v for k, v in row.items() if k != "rungs"} for row in rows]))


def measure_rivals(asked: argparse.Namespace) -> None:
    from benchmarks.compress import rivals

    for name in asked.rows or RIVALLED:
        trial, start = TRIALS[name], time.perf_counter()
        data, tuning = data_of(trial.data, asked), trial.compress.get("tune", {})
        with trained(name, trial, data, seed=0) as (paths, _):
            rows = rivals.measure(
                trial.model,
                data,
                paths.model / "model.safetensors",
                batch_size=trial.batch_size,
                epochs=tuning.get("epochs", trial.epochs),
                rate=trial.optimizer["args"]["lr"] * tuning.get("lr", 1.0),
            )
        for row in rows:
            Console().print(name, row)
        if asked.keep:
            command = f"python -m benchmarks.compress {name} --rivals"
            kept = {"command": command, "rows": rows, "wall_s": round(time.perf_counter() - start, 1)}
            report.keep("compress", f"rivals of {name}", kept)


def measure_row(name: str, asked: argparse.Namespace, seed: int) -> dict[str, Any]:
    if name in shrinking.SHRINKS:
        return shrinking.measure(name, mnist_data(asked.mnist), seed)
    trial = TRIALS[name]
    return measure(name, trial, data_of(trial.data, asked), seed)


def measure(name: str, trial: Trial, data: dict[str, Any], seed: int) -> dict[str, Any]:
    """Train a parent, compress it, and return the numbers of the result."""
    start, used = time.perf_counter(), shrinking.children_cpu_s()
    with trained(name, trial, data, seed) as (paths, fork_server):
        request = CompressRequest(paths, paths.root.parent, show=print)
        made = compress(request, CompressConfig.model_validate(trial.compress), fork_server=fork_server)
    times = {"wall_s": time.perf_counter() - start, "cpu_s": shrinking.children_cpu_s() - used}
    return {"seed": seed, **numbers(made.report), **{key: round(value, 1) for key, value in times.items()}}


@contextlib.contextmanager
def trained(name: str, trial: Trial, data: dict[str, Any], seed: int) -> Iterator[tuple[RunPaths, ForkServer]]:
    """The parent of a row: the same weights for the same seed."""
    job = job_of(name, trial, data, seed)
    modules = [*modules_to_preload(job), PROBES]
    with (
        tempfile.TemporaryDirectory(prefix="shoal-compress-") as scratch,
        make_fork_server(1, modules=modules) as fork_server,
    ):
        result = run_executor.run(job, runs=Path(scratch), fork_server=fork_server)
        if result.error:
            raise result.error
        yield result.paths, fork_server


def numbers(found: CompressionReport) -> dict[str, Any]:
    chosen = next(one for one in found.rungs if one.name == found.chosen)
    test = found.test
    assert test is not None
    times = {f"eager x{size}": 1 / ratio for size, ratio in chosen.eager_ratio.items()}
    same = chosen.latency.ratios if chosen.latency else {}
    return {
        "chosen": found.chosen,
        "smaller": 1 / (chosen.size_ratio or 1),
        "bytes": chosen.artefact.size_bytes if chosen.artefact else 0,
        "parent": test.parent,
        "test": test.value,
        "drop": test.drop,
        "bound": test.drop_bound,
        **times,
        **{f"runtime x{size}": 1 / ratio.median for size, ratio in same.items()},
        "rungs": [one.model_dump(mode="json", exclude={"steps", "artefact"}) for one in found.rungs],
    }


DIGITS = {
    "source": {"kind": "sklearn", "name": "digits"},
    "split": {"kind": "holdout", "validation": 0.2, "test": 0.2},
}


def mnist_data(mnist: Path) -> dict[str, Any]:
    def part(stem: str) -> dict[str, str]:
        files = {"path": f"{stem}-images-idx3-ubyte.gz", "target": f"{stem}-labels-idx1-ubyte.gz"}
        return {"kind": "idx", **{key: str((mnist / file).resolve()) for key, file in files.items()}}

    return {
        "source": part("train"),
        "test": part("t10k"),
        "split": {"kind": "holdout", "validation": 1 / 6},
        "transform": "models.py:as_image",
        "leaks": "ignore",
    }


def data_of(kind: str, asked: argparse.Namespace) -> dict[str, Any]:
    if kind == "text":
        source = {"kind": "text", "path": str(asked.text.resolve()), "context": 64, "level": "byte"}
        return {"source": source, "split": {"kind": "holdout", "validation": 0.1, "test": 0.1, "shuffle": False}}
    return DIGITS if kind == "digits" else mnist_data(asked.mnist)


def job_of(name: str, trial: Trial, data: dict[str, Any], seed: int) -> Job:
    return make_job(
        {
            "name": name,
            "seed": seed,
            "model": f"models.py:{trial.model}",
            "loss": "CrossEntropyLoss",
            "metrics": [] if trial.metric == "loss" else [trial.metric],
            "optimizer": trial.optimizer,
            "schedule": {"name": "CosineAnnealingLR", "args": {"T_max": "steps"}},
            "data": data,
            "batch_size": trial.batch_size,
            "epochs": trial.epochs,
            "workers": trial.workers,
            "evaluate": {"every_epochs": trial.epochs},
            "best": {"metric": trial.metric},
            "checkpoint": {"every": "never"},
            "export": [],
        },
        base_dir=HERE,
    )


if __name__ == "__main__":
    main()
