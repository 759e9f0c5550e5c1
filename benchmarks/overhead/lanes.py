"""The cost of more lanes on one worker: the same global batch in more and smaller parts."""

from __future__ import annotations

import functools

from benchmarks.overhead.loop import STEPS, shoal_loop
from benchmarks.overhead.runs import BATCH, open_fork_server
from benchmarks.overhead.side_by_side import Bench, Row, in_turns, median, ratio

LANES = (1, 2, 4, 8)


def measure(bench: Bench) -> list[Row]:
    rows = []
    with open_fork_server() as fork_server:
        for model, most in STEPS.items():
            steps = most // (20 if bench.quick else 2)
            bench.say(f"lanes: {model}, {steps} steps, {bench.repeats} turns")
            variants = {str(n): functools.partial(shoal_loop, model, steps, bench, fork_server, lanes=n) for n in LANES}
            found = in_turns(variants, bench.repeats)
            rows += [
                {
                    "model": model,
                    "lanes": int(name),
                    "samples/s": steps * BATCH[model] / median(numbers, "wall_s"),
                    "time of 1 lane": ratio(numbers, found["1"], "wall_s"),
                    "time of 1 lane, CPU": ratio(numbers, found["1"], "cpu_s"),
                }
                for name, numbers in found.items()
            ]
    return rows
