"""python -m benchmarks.search decisions [--trials 1000] [--axes 8]

Processor time of a decision of the default search (`promote`, `gp`), as the search grows: trials of 50 units with
made-up curves, eight slots. `decision ms` is the mean over the decisions at that number of trials (or up to a tenth
fewer), `proposal ms` over those that proposed a new trial.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import numpy as np

from shoal.plan.search.make import make_search
from shoal.plan.search.trial import SearchEnd, ShapeWanted, Stretch, StretchResult, TrialShape
from shoal.plan.search.virtual import VirtualSearch
from shoal.spec.job import Job

UNITS = 50
SLOTS = 8


def decision_search(axes: int) -> VirtualSearch:
    job = Job.model_validate(
        {
            "model": "table:Row",
            "loss": "MSELoss",
            "epochs": UNITS,
            "data": {"source": {"kind": "npz", "path": "table.npz"}},
            "search": {
                "space": {f"model.args.x{i}": {"low": 0.0, "high": 1.0} for i in range(axes)},
                "metric": "error",
                "slots": SLOTS,
                "budget": "1000000 trials",
            },
        }
    )
    return make_search(job)


def made_up(stretch: Stretch) -> StretchResult:
    """The closer to the middle, the better; better with training."""
    gap = sum((value - 0.5) ** 2 for value in stretch.changes.values())
    rows = [{"error": gap + 1 / math.sqrt(unit + 1)} for unit in range(stretch.start, stretch.end)]
    return StretchResult(tuple(rows))


def decision_times(axes: int, trials: int) -> list[tuple[int, bool, float]]:
    """For each decision: the number of trials, whether it proposed one, its milliseconds."""
    plan, running, found = decision_search(axes), dict[int, Stretch](), list[tuple[int, bool, float]]()
    while len(plan.ledger.trials) < trials:
        began_s = time.process_time()
        decision = plan.decide()
        spent_ms = 1000 * (time.process_time() - began_s)
        if isinstance(decision, ShapeWanted):
            plan.tell_shape(decision.trial, TrialShape(UNITS, 1.0, {}))
        elif isinstance(decision, Stretch):
            running[decision.number] = decision
        elif isinstance(decision, SearchEnd):
            break
        else:
            plan.tell(decision.number, made_up(running.pop(decision.number)))
            continue
        found.append((len(plan.ledger.trials), isinstance(decision, ShapeWanted), spent_ms))
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--axes", type=int, default=8)


def run(asked: argparse.Namespace) -> list[dict[str, Any]]:
    found, rows = decision_times(asked.axes, asked.trials), []
    for at in sorted({n for n in (50, 200, 500, 1000) if n < asked.trials} | {asked.trials}):
        near = [(new, spent_ms) for count, new, spent_ms in found if 0.9 * at <= count <= at]
        every, new = [ms for _, ms in near], [ms for proposed, ms in near if proposed]
        rows.append(
            {
                "trials": at,
                "decision ms": round(float(np.mean(every)), 2),
                "proposal ms": round(float(np.mean(new)), 2),
                "p99 ms": round(float(np.percentile(every, 99)), 2),
            }
        )
    return rows
