"""Training whose model becomes smaller on the way, beside the same training without that."""

from __future__ import annotations

import resource
import tempfile
import time
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
STEPS = 2400
"""About six epochs."""
WORKERS = 2


def measure(name: str, data: dict[str, Any], seed: int) -> dict[str, Any]:
    """Train both on two workers, one after the other. CPU time is that of all processes, with their start.

    The workers send their gradients over TCP, as two machines do. `sent` is what they counted, of both legs.
    """
    start = time.perf_counter()
    dense, shrunk = (_train(data, seed, shrink) for shrink in (None, SHRINKS[name]))
    return {
        "seed": seed,
        "faster": dense["cpu_s"] / shrunk["cpu_s"],
        "parameters": shrunk["parameters"] / dense["parameters"],
        "sent": shrunk["sent_bytes"] / dense["sent_bytes"],
        "dense": dense["test"],
        "shrunk": shrunk["test"],
        "wall_s": round(time.perf_counter() - start, 1),
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
            "steps": STEPS,
            "evaluate": {"every_steps": STEPS // 10},
            "best": {"metric": "accuracy"},
            "workers": WORKERS,
            "engine": {"kind": "local", "apart": True, "machines": WORKERS},
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
    """What the workers of all legs sent to each other. If one was lost, the other one trained alone: no measurement."""
    states = [load_state(paths.events, paths.state_snapshot) for paths in map(RunPaths.at, runs.iterdir())]
    if any(state.deaths for state in states):
        raise RuntimeError("a worker was lost: measure again on a machine that is less busy")
    return sum(state.bytes_sent for state in states)


def children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
