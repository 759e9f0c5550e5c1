"""Samples per second of Shoal's loop with one lane against plain PyTorch loops."""

from __future__ import annotations

import functools
import json
from typing import Any

from benchmarks.overhead.runs import BATCH, job, open_fork_server, plain_run, shoal_run
from benchmarks.overhead.side_by_side import Bench, Numbers, Row, in_turns, median, ratio
from shoal.fleet.forkserver import ForkServer

STEPS = {"mlp": 2500, "cnn": 150, "gpt": 60}
PLAIN = {
    "plain, DataLoader": {"loop": "loader", "fused": False},
    "plain, DataLoader, fused": {"loop": "loader", "fused": True},
    "plain, tensors": {"loop": "tensors", "fused": False},
    "plain, tensors, fused": {"loop": "tensors", "fused": True},
}
FASTEST = "plain, tensors, fused"


def measure(bench: Bench) -> list[Row]:
    with open_fork_server() as fork_server:
        return [row for model in STEPS for row in compare(model, bench, fork_server)]


def compare(model: str, bench: Bench, fork_server: ForkServer) -> list[Row]:
    """One model. `of fastest` is samples/s relative to the fastest plain loop, by wall and by processor time."""
    steps = STEPS[model] // (10 if bench.quick else 1)
    bench.say(f"loop: {model}, {steps} steps, {bench.repeats} turns")
    plain = {name: functools.partial(plain_loop, model, steps, how, bench, fork_server) for name, how in PLAIN.items()}
    shoal = functools.partial(shoal_loop, model, steps, bench, fork_server)
    found = in_turns({**plain, "shoal": shoal}, bench.repeats)
    return [
        {
            "model": model,
            "loop": name,
            "samples/s": steps * BATCH[model] / median(numbers, "wall_s"),
            "of fastest": 1 / ratio(numbers, found[FASTEST], "wall_s"),
            "of fastest, CPU": 1 / ratio(numbers, found[FASTEST], "cpu_s"),
        }
        for name, numbers in found.items()
    ]


def plain_loop(model: str, steps: int, how: dict[str, Any], bench: Bench, fork_server: ForkServer) -> Numbers:
    window = window_of(steps, bench)
    asked = {**how, "model": model, "data": str(bench.data), "batch_size": BATCH[model]}
    plain_run({**asked, "window": window, "steps": window["last"] + 1}, bench.scratch / "logs", fork_server)
    return report(bench)


def shoal_loop(model: str, steps: int, bench: Bench, fork_server: ForkServer, *, lanes: int = 1) -> Numbers:
    window = window_of(steps, bench, calls=lanes)
    plain_job = job(model, bench.data, steps=window["last"] // lanes + 1, window=window, lanes=lanes)
    shoal_run(plain_job, bench.scratch / "runs", fork_server)
    return report(bench)


def window_of(steps: int, bench: Bench, *, calls: int = 1) -> dict[str, Any]:
    """First and last forward pass of the stopwatch, with `calls` forward passes per step."""
    warm = min(20, steps)
    return {"first": warm * calls, "last": (warm + steps) * calls, "report": str(bench.scratch / "report.json")}


def report(bench: Bench) -> Numbers:
    path = bench.scratch / "report.json"
    numbers: Numbers = json.loads(path.read_text())
    path.unlink()
    return numbers
