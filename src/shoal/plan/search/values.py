"""What the rows of a trial count as: its value in each objective, and by how much it breaks the constraints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from shoal.plan.search.pareto import rank_scores
from shoal.spec.receipt import mean_of
from shoal.spec.search import ConstraintConfig, ObjectiveConfig

Rows = Sequence[Mapping[str, float]]
Scores = NDArray[np.float64]


def counted(goal: ObjectiveConfig, rows: Rows, facts: Mapping[str, float], *, means: bool, several: bool) -> float:
    """Larger is better; -inf where a number is missing. With folds or seeds the mean over them; with one metric the
    best so far, because the best weights are kept; with several metrics those of the newest weights."""
    if goal.metric in facts:
        return goal.sign * facts[goal.metric]
    found = [goal.sign * row.get(goal.metric, math.nan) for row in rows]
    finite = [value for value in found if math.isfinite(value)]
    if not finite:
        return -math.inf
    if means:
        return mean_of(finite) if len(finite) == len(found) else -math.inf
    return finite[-1] if several else max(finite)


def violation(rules: Sequence[ConstraintConfig], rows: Rows, facts: Mapping[str, float], *, means: bool) -> float:
    """By how much a trial breaks the constraints, as far as that is known: by its facts, and by its newest row or, with
    folds or seeds, the mean over them."""
    total = 0.0
    for rule in rules:
        if rule.metric in facts:
            total += rule.violation(facts[rule.metric])
        elif rows:
            value = mean_of([row.get(rule.metric, math.nan) for row in (rows if means else rows[-1:])])
            total += rule.violation(value) if math.isfinite(value) else math.inf
    return total


def in_one_number(table: Scores, broken: Scores) -> Scores:
    """One number for each row of objectives, larger is better: with several, its rank among these rows. Those that
    break a constraint come after all that do not."""
    scores = rank_scores(table) if table.shape[1] > 1 else table[:, 0].copy()
    return penalised(np.asarray(scores, dtype=np.float64), broken)


def penalised(scores: Scores, broken: Scores) -> Scores:
    """The scores, those that break a constraint below all others: the more they break it, the lower."""
    if not np.any(broken > 0):
        return scores
    finite = scores[np.isfinite(scores)]
    floor, spread = (float(finite.min()), float(np.ptp(finite)) + 1.0) if len(finite) else (0.0, 1.0)
    return np.asarray(np.where(broken > 0, floor - spread * (2 - 1 / (1 + broken)), scores))
