"""Regret against simulated time, for Shoal's default search and for the policies of other tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from benchmarks.search.free_running import run_rival
from benchmarks.search.rivals import make_rival
from benchmarks.search.tables import CurveTable, TableSpace
from benchmarks.search.workers import LANES, Observations, SimulatedFleet
from shoal.plan.search.make import Values, first_trials, make_search
from shoal.plan.search.virtual import VirtualSearch
from shoal.spec.job import Job

POLICIES = ("shoal", "random", "asha", "tpe", "tpe+hyperband", "tpe+asha")
TIMES = (1.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Conditions:
    """How a search is simulated. `slots`: as many as workers without it. `warm`: Shoal's search begins with what
    earlier searches on so many other tables suggest."""

    order: str = "virtual"
    workers: int = 4
    horizon: float = 10.0
    slots: int | None = None
    lanes: int = LANES
    warm: int = 0


EARLIER = Conditions()
EARLIER_SEED = 100


def simulate(tables: Sequence[CurveTable], policy: str, asked: Conditions, *, seeds: int) -> dict[str, Any]:
    """Mean regret over tables and seeds, with standard errors, and the processor time of a decision."""
    named = [(t, seed) for t in tables for seed in range(seeds)]
    first = [earlier_values(tables, t, asked.warm, s) for t, s in named]
    runs = [_run(t, policy, asked, seed=s, first=values) for (t, s), values in zip(named, first, strict=True)]
    order = asked.order if policy == "shoal" else "clock"
    row: dict[str, Any] = {"policy": policy, "order": order, "workers": asked.workers}
    if policy == "shoal":
        told = {"slots": asked.slots, "lanes": asked.lanes if asked.lanes != LANES else None, "warm": asked.warm}
        row |= {name: value for name, value in told.items() if value}
    if asked.warm:
        for name, when in (("at 1", 1.0), ("at their ends", np.inf)):
            regrets = np.array([regret_of_all(t, values, when) for (t, _), values in zip(named, first, strict=True)])
            row[f"suggestions alone {name}"] = round(float(regrets.mean()), 4)
    for when in TIMES:
        if when <= asked.horizon:
            regrets = np.array([t.regret(found.best_at(when)) for (t, _), found in zip(named, runs, strict=True)])
            row[f"regret at {when:g}"] = round(float(regrets.mean()), 4)
            row[f"± at {when:g}"] = (
                round(float(regrets.std(ddof=1) / np.sqrt(len(regrets))), 4) if len(runs) > 1 else 0.0
            )
    spent_ms = 1000 * np.concatenate([np.array(found.decisions_s) for found in runs])
    row |= {"decision ms": round(float(spent_ms.mean()), 2), "p99 ms": round(float(np.percentile(spent_ms, 99)), 2)}
    return row | {"runs": len(runs)}


def regret_of_all(t: CurveTable, first: Sequence[Values], when: float) -> float:
    """The regret if all suggestions are trained at once, each on a worker of its own."""
    rows = [int(TableSpace(t).suggest(values).changes["row"]) for values in first]
    return t.regret(float(np.nanmin(np.where(t.time[rows] <= when, t.error[rows], np.inf))))


def earlier_values(tables: Sequence[CurveTable], t: CurveTable, count: int, seed: int) -> list[Values]:
    """What earlier searches on some other tables of the same space suggest."""
    others = [one for one in tables if one is not t and one.cube.shape[1] == t.cube.shape[1]]
    if count > len(others):
        raise SystemExit(f"{t.name}: there are {len(others)} other tables of the same space, fewer than {count}")
    generator = np.random.default_rng([seed, *t.name.encode()])
    return first_trials([earlier_search(others[i]) for i in generator.permutation(len(others))[:count]])


@cache
def earlier_search(t: CurveTable) -> list[tuple[Values, float]]:
    """A search without any before it, with a seed of its own: places and costs of its trials, the best first."""
    plan = default_search(t, slots=EARLIER.workers, order=EARLIER.order, seed=EARLIER_SEED)
    SimulatedFleet(t, plan, EARLIER.workers, EARLIER.horizon, EARLIER_SEED).run()
    ranked = plan.ledger.ranking(one for one in plan.ledger.trials if one.rows and one.status != "failed")
    return [({f"x{i}": place for i, place in enumerate(one.point.cube)}, one.shape.cost) for one in ranked]


def _run(t: CurveTable, policy: str, asked: Conditions, *, seed: int, first: Sequence[Values]) -> Observations:
    if policy != "shoal":
        return run_rival(t, make_rival(policy, t, seed), workers=asked.workers, horizon=asked.horizon, seed=seed)
    plan = default_search(t, slots=asked.slots or asked.workers, order=asked.order, seed=seed, first=first)
    lanes = asked.lanes if asked.order == "virtual" else 1
    return SimulatedFleet(t, plan, asked.workers, asked.horizon, seed, lanes=lanes).run()


def default_search(
    t: CurveTable,
    *,
    slots: int,
    order: str,
    seed: int,
    sampler: str = "gp",
    first: Sequence[Values] = (),
) -> VirtualSearch:
    """The default policy of a job, with the rows of the table as its space. `first`: what is tried first."""
    job = Job.model_validate(
        {
            "model": "table:Row",
            "loss": "MSELoss",
            "epochs": t.error.shape[1],
            "data": {"source": {"kind": "npz", "path": "table.npz"}},
            "seed": seed,
            "search": {
                "space": {"optimizer.args.lr": {"low": 0.0, "high": 1.0}},
                "metric": "error",
                "slots": slots,
                "order": order,
                "budget": "1000000 trials",
                "policy": {"kind": "promote", "sampler": sampler},
            },
        }
    )
    space = TableSpace(t)
    unique = {space.suggest(values).key: values for values in first}
    return make_search(job, space=space, suggestions=list(unique.values()))
