"""python -m benchmarks.stragglers [--rounds 3] [--slow 4] [--side WORDS ...] [--data DIR] [--quick]

One of three workers gets a quarter of its processor (it is stopped and continued) as soon as all train. Lanes and
servers, with lanes that move to the faster workers and with lanes that stay; all sides in turns.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import report
from benchmarks.links.quality import SMOOTH_STEPS, Curve, smooth
from benchmarks.links.samples import prepare
from benchmarks.overhead.runs import job, open_fork_server
from benchmarks.overhead.side_by_side import Numbers, Row, in_turns, median, ratio
from benchmarks.unequal.cpu_throttle import CpuThrottle
from shoal.events import Event, RunState
from shoal.fleet.forkserver import ForkServer
from shoal.jobs import run_dir
from shoal.jobs.run_driver import RunDriver
from shoal.spec.load import make_job

WORKERS, SERVERS = 3, 2
MANY = 12  # lanes that can move
BATCH = 384
MAX_S = 300.0
BASE = "lanes, they stay"
SIDES: Mapping[str, dict[str, Any]] = {
    BASE: {"lanes": MANY, "elastic": {"balance": False}},
    "lanes, they move": {"lanes": MANY, "elastic": {"balance": True}},
} | {
    f"server, {staleness}, {words}": {
        "lanes": lanes,
        "elastic": {"balance": words == "they move"},
        "sync": {"kind": "server", "servers": SERVERS, "staleness": staleness},
    }
    # with staleness each lane pushes separately, so there is one lane per worker
    for staleness, lanes, words in (
        (0, MANY, "they stay"),
        (0, MANY, "they move"),
        (4, 3, "one each"),
        ("inf", 3, "one each"),
    )
}


@dataclass
class LossWatch:
    """Slows the last worker when all have joined, and records the losses of each worker."""

    slow: int
    joined: dict[str, int] = field(default_factory=dict)
    told: list[tuple[float, float, int]] = field(default_factory=list)
    slowed: CpuThrottle | None = None
    began_t: float = 0.0

    def on_event(self, event: Event, state: RunState) -> None:
        if event.kind == "joined" and self.slowed is None:
            self.joined[event.who] = state.worker(event.who).pid
            if len(self.joined) == WORKERS:
                self.began_t = time.time()
                self.slowed = CpuThrottle(self.joined[max(self.joined)], self.slow)
                self.slowed.start()
        if event.kind == "step" and self.slowed:
            self.told.append((event.t, event["loss"], event["samples"]))

    def reached(self, loss: float) -> float | None:
        found = smooth(sorted(self.told), SMOOTH_STEPS * BATCH)
        return next((t - self.began_t for t, value in found if value <= loss), None)

    def samples_per_s(self) -> float:
        return sum(samples for _, _, samples in self.told) / (self.told[-1][0] - self.began_t)

    def stop(self) -> None:
        if self.slowed:
            self.slowed.stop()


@dataclass(frozen=True)
class Comparison:
    data: Path
    scratch: Path
    fork_server: ForkServer
    slow: int
    loss: float = 0.0

    def measure(self, side: str) -> Numbers:
        """Seconds from the slowdown until the loss is reached; `MAX_S` for a run that takes longer."""
        watch = LossWatch(self.slow)
        going = self._started(watch.on_event, workers=WORKERS, **SIDES[side])
        deadline = time.monotonic() + MAX_S
        try:
            while (seconds := watch.reached(self.loss)) is None and time.monotonic() < deadline:
                going.wait(0.1)
                if outcome := going.tick():
                    raise outcome.error or RuntimeError(f"the run is {outcome.status}")
        finally:
            watch.stop()
            going.close()
        return {"seconds": seconds or MAX_S, "samples/s": watch.samples_per_s()}

    def target(self, steps: int) -> float:
        """The loss of one undisturbed worker after `steps`."""
        curve = Curve(BATCH)
        going = self._started(curve.on_event, steps=steps, workers=1)
        while going.tick() is None:
            going.wait(0.1)
        return list(curve.smooth())[-1][1]

    def _started(self, look: Callable[[Event, RunState], None], **changes: Any) -> RunDriver:
        asked = {"steps": 10**6, "lanes": MANY, "batch_size": BATCH, "checkpoint": {"every": "never"}, **changes}
        plain = {**job("cnn", self.data, window={}, **asked), "model": "benchmarks.overhead.models:cnn"}
        made = make_job(plain)
        going = RunDriver(made, run_dir.create(made, self.scratch / "runs"), self.fork_server, on_event=look)
        going.start()
        return going


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stragglers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120, help="to the loss that sides race to")
    parser.add_argument("--slow", type=int, default=4, help="how many times slower one of the three workers is")
    parser.add_argument("--side", action="append", metavar="WORDS", help="sides that begin so; may be repeated")
    parser.add_argument("--data", type=Path, help="a directory with MNIST's IDX files")
    parser.add_argument("--quick", action="store_true", help="few steps, one turn, nothing written: does it work?")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch, open_fork_server() as fork_server:
        race = Comparison(prepare(asked.data, Path(scratch, "data")), Path(scratch), fork_server, asked.slow)
        loss = race.target(40 if asked.quick else asked.steps)
        rows = compare(Comparison(race.data, race.scratch, fork_server, asked.slow, loss), asked.side, asked.rounds)
        Console(width=140).print(report.table(f"stragglers: seconds to a loss of {loss:.3f}", rows))
        if not (asked.quick or asked.side):
            report.keep("stragglers", "cnn", {"loss": loss, "slow": asked.slow, "rows": rows})


def compare(race: Comparison, chosen: list[str] | None, rounds: int) -> list[Row]:
    sides = {name: partial(race.measure, name) for name in SIDES if not chosen or name.startswith(tuple(chosen))}
    found = in_turns(sides, rounds)
    return [
        {
            "side": name,
            "seconds": median(numbers, "seconds"),
            f"of {BASE}": ratio(numbers, found[BASE], "seconds") if BASE in found else "",
            "samples/s": median(numbers, "samples/s"),
            "turns": [round(one["seconds"], 1) for one in numbers],
        }
        for name, numbers in found.items()
    ]


if __name__ == "__main__":
    main()
