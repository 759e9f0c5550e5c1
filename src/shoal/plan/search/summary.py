"""What there is to show of a search: its trials, the best so far, the ranking, the front, and which values matter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal.plan.search.importance import importance
from shoal.plan.search.ledger import TrialState
from shoal.plan.search.pareto import hypervolume
from shoal.plan.search.standing import standing
from shoal.plan.search.virtual import VirtualSearch
from shoal.plan.search.winner import best_trial, front


@dataclass(frozen=True)
class TrialSummary:
    """A row of the table of trials. `values` are the metrics as the job writes them; `unit` of `units` is known."""

    number: int
    status: str
    unit: int
    units: int
    values: Mapping[str, float]
    changes: Mapping[str, Any]
    failure: str = ""
    why: str = ""
    repeat_of: int | None = None


@dataclass(frozen=True)
class BestSoFar:
    """A new best value of the first metric, after so many trainings and at a virtual time."""

    trainings: float
    virtual: float
    trial: int
    value: float


@dataclass(frozen=True)
class SearchSummary:
    """`ranking`: numbers of trials, best first. `spent`: trainings. `front` and `volume` for several metrics."""

    metrics: tuple[str, ...]
    trials: tuple[TrialSummary, ...]
    best: int | None
    ranking: tuple[int, ...]
    history: tuple[BestSoFar, ...]
    importance: Mapping[str, float]
    spent: float
    virtual: float
    front: tuple[int, ...] = ()
    volume: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)


def summarise(search: VirtualSearch) -> SearchSummary:
    """Everything that is known at the search's virtual time."""
    ledger = search.ledger
    sign = ledger.objectives[0].sign
    best = best_trial(ledger)
    several = front(ledger) if ledger.several else []
    statuses = [t.status for t in ledger.trials]
    return SearchSummary(
        metrics=tuple(objective.metric for objective in ledger.objectives),
        trials=tuple(_row(search, trial) for trial in ledger.trials),
        best=None if best is None else best.number,
        ranking=tuple(t.number for t in standing(ledger, ledger.searched())),
        history=tuple(BestSoFar(i.trainings, i.virtual, i.trial, sign * i.value) for i in search.history),
        importance=importance(ledger),
        spent=search.spent,
        virtual=search.now,
        front=tuple(t.number for t in several),
        volume=_volume(search) if ledger.several else None,
        counts={status: statuses.count(status) for status in dict.fromkeys(statuses)},
    )


def _row(search: VirtualSearch, trial: TrialState) -> TrialSummary:
    known = search.ledger.curve_at(trial)
    pairs = zip(search.ledger.objectives, known, strict=True)
    values = {goal.metric: goal.sign * value for goal, value in pairs if math.isfinite(value)}
    return TrialSummary(
        trial.number, trial.status, trial.reached, trial.shape.units, values, trial.point.changes,
        trial.failure, trial.why, trial.repeat_of,
    )  # fmt: skip


def _volume(search: VirtualSearch) -> float:
    """The hypervolume, against the worst value of each metric so far."""
    known = [search.ledger.values(t) for t in search.ledger.searched() if t.status != "failed" and t.rows]
    table = np.array([row for row in known if np.isfinite(row).all()])
    return hypervolume(table, table.min(axis=0).tolist()) if len(table) else 0.0
