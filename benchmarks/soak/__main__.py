"""python -m benchmarks.soak [--kind lanes|servers|local|fsdp|all] [--minutes 60] [--every 10] [--seed 0]

A run is disturbed every few seconds: a worker, a loader process, a server or the driver is killed, a worker is frozen,
one joins, one leaves. Meanwhile memory, descriptors, threads and processes are counted. At the end the run is stopped,
and an undisturbed run of as many steps must have the same weights. `all` divides the minutes over the kinds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.reference_run import reference_weights, saved_weights
from benchmarks.report import keep
from benchmarks.soak.disturbance import Soak, summary
from benchmarks.soak.kinds import KINDS, SoakKind

START_TIMEOUT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--kind", choices=[*KINDS, "all"], default="all")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--every", type=float, default=10, help="seconds between two disturbances")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a directory for the runs; a temporary one if none is named")
    asked = parser.parse_args()
    names = list(KINDS) if asked.kind == "all" else [asked.kind]
    found = {}
    with tempfile.TemporaryDirectory(prefix="shoal-soak-") as temporary:
        for name in names:
            scratch = (asked.keep or Path(temporary)) / name
            scratch.mkdir(parents=True, exist_ok=True)
            print(f"{name}:", flush=True)
            found[name] = soak(
                KINDS[name], scratch, minutes=asked.minutes / len(names), every_s=asked.every, seed=asked.seed
            )
            print(json.dumps(found[name], indent=1), flush=True)
            if asked.minutes / len(names) >= 5:
                keep("soak", name, found[name])
    sys.exit(0 if all(one["survived"] and one["same_weights"] for one in found.values()) else 1)


def soak(kind: SoakKind, scratch: Path, *, minutes: float, every_s: float, seed: int) -> dict[str, Any]:
    one = Soak(kind, scratch, seed=seed)
    with contextlib.closing(one):
        wait_for_training(one)
        until, samples = time.monotonic() + 60 * minutes, []
        while time.monotonic() < until and one.alive:
            time.sleep(every_s)
            samples.append(one.counts())
            print(f"step {one.state.step}, {samples[-1]['processes']:.0f} processes: {one.disturb()}", flush=True)
        survived = one.alive
        if survived:
            wait_for_training(one)
            one.stop()
    step, weights = saved_weights(one.paths)
    runs = one.paths.root.parent
    reference = reference_weights(one.job, steps=step, runs=runs, workers=kind.reference_workers)
    return {
        "minutes": minutes,
        "survived": survived,
        "steps": step,
        **summary(one, samples),
        "compared_with": kind.compared_with,
        "same_weights": reference == weights,
    }


def wait_for_training(one: Soak) -> None:
    """Wait until a driver drives the run and workers train: the last fault may have killed them."""
    until = time.monotonic() + START_TIMEOUT_S
    while not one.trains:
        if not one.alive or time.monotonic() > until:
            raise RuntimeError(f"the run does not train; {one.log}:\n{one.log.read_text()}")
        time.sleep(0.2)
        one.poll_events()


if __name__ == "__main__":
    main()
