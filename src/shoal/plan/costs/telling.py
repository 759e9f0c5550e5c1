"""What events say of a plan, and of one that was made again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.plan.costs.choose import Plan, Row
from shoal.plan.costs.facts import Prediction

MOST_TOLD = 5
"""So many of the ways that were not taken are told with their reasons."""

_PARTS = ("compute_s", "encode_s", "exchange_s", "apply_s")


def plan_told(plan: Plan, pick: Row, notes: Sequence[str]) -> dict[str, Any]:
    """The choice, its prediction, the reasons, and what was not allowed."""
    named = {row.prediction.choice.name: row for row in reversed(plan.rows) if row is not pick}
    fastest = [row for row in plan.rows if named.get(row.prediction.choice.name) is row]
    return {
        "choice": choice_told(pick.prediction),
        "prediction": prediction_told(pick.prediction),
        "reason": pick.reason,
        "offer": row_told(plan.offer) if plan.offer else None,
        "others": [row_told(row) for row in fastest[:MOST_TOLD]],
        "notes": list(notes),
    }


def choice_told(it: Prediction) -> dict[str, Any]:
    choice = it.choice
    return {"workers": choice.workers, "hosts": choice.hosts, "threads": choice.threads, "how": choice.name}


def prediction_told(it: Prediction) -> dict[str, float]:
    """Seconds and bytes of a step; the parts add up to `step_s`."""
    values = {name: getattr(it, name) for name in ("step_s", *_PARTS, "hidden_s", "epoch_s")}
    sizes = {"sent_bytes": it.sent_bytes, "memory_bytes": it.memory_bytes}
    return {name: rounded(value) for name, value in (values | sizes).items()}


def row_told(row: Row) -> dict[str, Any]:
    """One that was not taken. `needs`: words that `plan.allow` lacks."""
    needs = [] if row.allowed else list(row.changes)
    step_s = rounded(row.prediction.step_s) if row.possible else None
    return {**choice_told(row.prediction), "step_s": step_s, "needs": needs, "reason": row.reason}


def rounded(value: float) -> float:
    return float(f"{value:.4g}")
