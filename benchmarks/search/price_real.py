"""python -m benchmarks.search price_real [--trials 24] [--workers 2] [--turns 5]

The price of reproducibility with real runs: the same trials, decided in virtual order and in the order of the clock.
Every trial is trained to its end, so both orders do the same work; the longest takes about ten times as long as the
shortest (`trial_seconds`). The two take turns with one loaded fork server, after a search that does not count. `ratios`
are those of each turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from shoal.fleet.forkserver import ForkServer
from shoal.jobs.fork_servers import make_fork_server, modules_to_preload
from shoal.jobs.probes import PROBE_MODULE
from shoal.jobs.search.driver import run_search
from shoal.jobs.search.summary import StoredSearch, read_search
from shoal.spec.job import Job
from shoal.spec.load import make_job


def price_job(order: str, *, trials: int, slots: int, steps: int) -> Job:
    """A search over the size of a net."""
    search = {
        "metric": "accuracy",
        "space": {
            "model.args.hidden": {"low": 64, "high": 512, "log": True},
            "batch_size": {"low": 32, "high": 128, "log": True},
            "optimizer.args.lr": {"low": 1e-4, "high": 1e-2, "log": True},
        },
        "policy": {"kind": "full", "sampler": "random"},
        "budget": f"{trials} trials",
        "slots": slots,
        "order": order,
    }
    return make_job(
        {
            "name": f"price-{order}",
            "model": {"name": "benchmarks.search.net:digits_net", "args": {"hidden": 64, "layers": 3}},
            "loss": "CrossEntropyLoss",
            "metrics": ["accuracy"],
            "optimizer": {"name": "AdamW", "args": {"lr": 0.001}},
            "data": {"source": {"kind": "sklearn", "name": "digits"}, "split": "holdout"},
            "batch_size": 64,
            "steps": steps,
            "lanes": 2,
            "search": search,
        }
    )


def run_once(order: str, asked: argparse.Namespace, runs: Path, fork_server: ForkServer) -> StoredSearch:
    job = price_job(order, trials=asked.trials, slots=asked.slots, steps=asked.steps)
    found = read_search(run_search(job, runs=runs, workers=asked.workers, fork_server=fork_server).paths)
    assert found.receipt is not None
    if found.receipt.failed:
        raise SystemExit(f"{found.receipt.failed} trials failed: the two orders did not do the same work")
    return found


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {"virtual": [], "clock": []}
    digests: set[str] = set()
    lasted: list[float] = []
    modules = [*modules_to_preload(price_job("virtual", trials=1, slots=1, steps=1)), PROBE_MODULE]
    with (
        tempfile.TemporaryDirectory(prefix="shoal-search-") as scratch,
        make_fork_server(1, modules=modules) as fork_server,
    ):
        warm = price_job("virtual", trials=2, slots=2, steps=20)
        run_search(warm, runs=Path(scratch, "warm"), workers=asked.workers, fork_server=fork_server)
        for turn in range(asked.turns):
            for order in ("virtual", "clock") if turn % 2 else ("clock", "virtual"):
                found = run_once(order, asked, Path(scratch, f"{order}-{turn}"), fork_server)
                assert found.receipt is not None
                seconds[order].append(found.receipt.total_s)
                digests |= {found.receipt.search_sha256} if order == "virtual" else set()
                lasted += [told.seconds for told in found.table.told.values()]
    ratios = [round(v / c, 4) for v, c in zip(seconds["virtual"], seconds["clock"], strict=True)]
    return {
        "workers": asked.workers,
        "slots": asked.slots,
        "trials": asked.trials,
        "ratio_median": statistics.median(ratios),
        "ratios": ratios,
        "seconds": seconds,
        "trial_seconds": {"shortest": min(lasted), "longest": max(lasted)},
        "one_search": len(digests) == 1,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)


def run(asked: argparse.Namespace) -> list[dict[str, Any]]:
    return [measure(asked)]
