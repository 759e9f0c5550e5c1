"""Training whose model becomes smaller on the way, beside the same training without that."""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path
from typing import Any

from shoal.events import load_state
from shoal.jobs import run_executor
from shoal.jobs.fork_servers import make_fork_server
from shoal.jobs.probes import run_probe
from shoal.jobs.run_index import find_weights
from shoal.spec.load import load_run_job, make_job
from shoal.spec.run_paths import RunPaths

HERE = Path(__file__).parent
SHRINKS = {"shrink": {"at": "30%", "keep": "60%"}, "shrink-more": {"at": "20%", "keep": "50%"}}
EPOCHS = 20
WORKERS = 2


def measure(name: str, data: dict[str, Any], seed: int) -> dict[str, Any]:
    """Train both on two workers, one after the other. CPU time is that of all processes, with their start.

    The workers share memory. `sent` is what two workers on two machines send: each its gradients, at every step.
    """
    dense, shrunk = (_train(data, seed, shrink) for shrink in (None, SHRINKS[name]))
    return {
        "seed": seed,
        "faster": dense["cpu_s"] / shrunk["cpu_s"],
        "parameters": shrunk["parameters"] / dense["parameters"],
        "sent": shrunk["sent_bytes"] / dense["sent_bytes"],
        "dense": dense["test"],
        "shrunk": shrunk["test"],
        "rungs": {"dense": dense, "shrunk": shrunk},
    }


def _train(data: dict[str, Any], seed: int, shrink: dict[str, str] | None) -> dict[str, Any]:
    job = make_job(
        {
            "name": "shrinking",
            "seed": seed,
            "model": "models.py:WideMlp",
            "loss": "CrossEntropyLoss",
            "metrics": ["accuracy"],
            "optimizer": {"name": "Adam", "args": {"lr": 1e-3}},
            "schedule": {"name": "CosineAnnealingLR", "args": {"T_max": "steps"}},
            "data": data,
            "batch_size": 128,
            "epochs": EPOCHS,
            "best": {"metric": "accuracy"},
            "workers": WORKERS,
            "checkpoint": {"every": "never"},
            "export": [],
            **({"shrink": shrink} if shrink else {}),
        },
        base_dir=HERE,
    )
    with tempfile.TemporaryDirectory(prefix="shoal-shrink-") as scratch:
        before = children_cpu_s()
        with make_fork_server(1) as fork_server:
            result = run_executor.run(job, runs=Path(scratch), fork_server=fork_server)
        cpu_s = children_cpu_s() - before
        if result.error:
            raise result.error
        assert result.receipt is not None
        done = load_run_job(result.paths.job)
        weights = find_weights(result.paths, done, best=False)
        found = run_probe("evaluate", done, weights=weights, part="test", source=None)["metrics"]["test"]
        return {
            "cpu_s": cpu_s,
            "sent_bytes": _sent_bytes(Path(scratch)),
            "parameters": result.receipt.parameters,
            "validation": result.receipt.metrics["accuracy"],
            "test": found["accuracy"],
            "weights_sha256": result.receipt.weights_sha256,
        }


def _sent_bytes(runs: Path) -> int:
    """The gradients of all legs: each worker sends its own to the other, 4 bytes per parameter and step."""
    total, before = 0, 0
    for paths in map(RunPaths.at, sorted(runs.iterdir())):
        state = load_state(paths.events, paths.state_snapshot)
        total += WORKERS * 4 * int(state.facts["parameters"]) * (state.step - before)
        before = state.step
    return total


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
