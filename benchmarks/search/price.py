"""What reproducible order costs: work done per time, against the same policy in the order of the clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.search.simulate import default_search
from benchmarks.search.tables import CurveTable
from benchmarks.search.workers import LANES, SimulatedFleet

HORIZON = 2.0
WAYS = {
    "clock": ("clock", 1, False),
    "virtual, idle workers help": ("virtual", 1, True),
    "virtual, idle workers help, twice the slots": ("virtual", 2, True),
    "virtual, twice the slots": ("virtual", 2, False),
    "virtual, nobody helps": ("virtual", 1, False),
}
"""Order, slots per worker, whether idle workers help."""


def price(tables: Sequence[CurveTable], *, workers: int, seeds: int, lanes: int = LANES) -> list[dict[str, Any]]:
    """One row per way: `busy` is the share of the workers' time with work, `done` the work against `clock`."""
    rows: list[dict[str, Any]] = []
    for way, (order, factor, helping) in WAYS.items():
        done, busy = [], []
        for t in tables:
            for seed in range(seeds):
                plan = default_search(t, slots=factor * workers, order=order, seed=seed, sampler="random")
                found = SimulatedFleet(t, plan, workers, HORIZON, seed, lanes=lanes if helping else 1).run()
                done.append(found.trained / found.ended)
                busy.append(found.busy / (workers * min(found.ended, HORIZON)))
        rows.append({"workers": workers, "way": way, "busy": round(float(np.mean(busy)), 3), "trained": np.mean(done)})
    base = rows[0]["trained"]
    return [
        {**row, "trained": round(float(row["trained"]), 3), "done": round(float(row["trained"] / base), 3)}
        for row in rows
    ]
