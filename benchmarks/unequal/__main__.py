"""python -m benchmarks.unequal [--model gpt] [--seconds 20] [--rounds 3] [--slow 3]

One of two workers gets a third of its processor (it is stopped and continued, 10 ms of every 30). Steps per second
with lanes that move, against equal shares, in turns; the weights of all runs are compared step by step at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.overhead.models import MODELS
from benchmarks.overhead.runs import job, open_fork_server, shoal_run
from benchmarks.overhead.samples import gather
from benchmarks.unequal.cpu_throttle import CpuThrottle
from shoal.events import Event, RunState
from shoal.fleet.forkserver import ForkServer
from shoal.spec.run_paths import RunPaths

REBALANCE_S = 6.0
STEPS = {"mlp": 6000, "cnn": 400, "gpt": 500}


class ThroughputWatch:
    """Slows worker-1 as soon as it trains, and records the times of committed steps."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.began = 0.0
        self.seen: list[tuple[float, int]] = []
        self.slowed: CpuThrottle | None = None

    def __call__(self, paths: RunPaths, event: Event, state: RunState) -> None:
        if event.kind == "joined" and event.who == "worker-1" and self.slowed is None:
            self.began = time.monotonic()
            self.slowed = CpuThrottle(state.worker("worker-1").pid, self.times)
            self.slowed.start()
        if event.kind == "step" and event.who == "worker-0" and self.slowed:
            self.seen.append((time.monotonic() - self.began, int(event.step or 0)))

    def stop(self) -> None:
        if self.slowed:
            self.slowed.stop()

    def steps_per_s(self) -> float:
        """Steps per second after lanes had time to move."""
        late = [(t, step) for t, step in self.seen if t > REBALANCE_S]
        return (late[-1][1] - late[0][1]) / (late[-1][0] - late[0][0])


def measure(
    model: str, data: Path, scratch: Path, fork_server: ForkServer, *, balance: bool, slow: int
) -> dict[str, Any]:
    watch = ThroughputWatch(slow)
    elastic = {"balance": balance}
    plain = job(model, data, steps=STEPS[model], window={}, lanes=8, workers=2, elastic=elastic)
    plain["model"] = f"benchmarks.overhead.models:{MODELS[model].__name__}"
    try:
        receipt = shoal_run(plain, scratch / "runs", fork_server, watch)
    finally:
        watch.stop()
    return {
        "steps/s": watch.steps_per_s(),
        "weights": receipt.weights_sha256,
        "samples carried": {name: one.samples for name, one in receipt.carried.items()},
        "views": receipt.views,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.unequal", description=__doc__)
    parser.add_argument("--model", choices=sorted(STEPS), default="gpt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slow", type=int, default=3, help="how many times slower one of the two workers is")
    asked = parser.parse_args()
    sides: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch, open_fork_server() as fork_server:
        data = gather(None, Path(scratch) / "data")
        for turn in range(asked.rounds):
            for balance in (True, False) if turn % 2 else (False, True):
                sides[balance].append(
                    measure(asked.model, data, Path(scratch), fork_server, balance=balance, slow=asked.slow)
                )
                print(f"lanes {'move' if balance else 'stay'}: {sides[balance][-1]}", flush=True)
    moving, staying = (statistics.median(one["steps/s"] for one in sides[balance]) for balance in (True, False))
    result = {
        "model": asked.model,
        "slow": asked.slow,
        "moving": sides[True],
        "staying": sides[False],
        "ratio": moving / staying,
        "same weights": len({one["weights"] for side in sides.values() for one in side}) == 1,
    }
    print(json.dumps({key: result[key] for key in ("ratio", "same weights")}))
    report.keep("unequal", asked.model, result)


if __name__ == "__main__":
    main()
