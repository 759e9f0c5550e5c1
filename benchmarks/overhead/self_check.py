"""What the self-check takes: whole runs at their defaults, and the checks' share of the workers' time."""

from __future__ import annotations

import functools

from benchmarks.overhead.loop import window_of
from benchmarks.overhead.runs import job, open_fork_server, shoal_run
from benchmarks.overhead.side_by_side import Bench, Numbers, Row, in_turns, median
from shoal.fleet.forkserver import ForkServer

STEPS = {"mlp": 20000, "cnn": 3000, "gpt": 1500}
WORKERS = (1, 2)


def measure(bench: Bench) -> list[Row]:
    """`share`: of the time of the workers since they joined."""
    rows: list[Row] = []
    with open_fork_server() as fork_server:
        for model, most in STEPS.items():
            steps = most // (20 if bench.quick else 1)
            bench.say(f"self_check: {model}, {steps} steps, {bench.repeats} turns")
            variants = {
                str(n): functools.partial(checked_run, model, steps, bench, fork_server, workers=n) for n in WORKERS
            }
            for name, numbers in in_turns(variants, bench.repeats).items():
                counted = {key: median(numbers, key) for key in numbers[0]}
                rows.append({"model": model, "workers": int(name), "steps": steps, **counted})
    return rows


def checked_run(model: str, steps: int, bench: Bench, fork_server: ForkServer, *, workers: int) -> Numbers:
    asked = job(model, bench.data, steps=steps, window=window_of(steps, bench), workers=workers)
    receipt = shoal_run(asked, bench.scratch / "runs", fork_server)
    checks = receipt.lanes_checked / workers
    return {
        "checks": checks,
        "ms per check": 1000 * receipt.checking_s / workers / max(checks, 1),
        "share": receipt.checking_s / (receipt.worker_s - receipt.startup_s),
    }
