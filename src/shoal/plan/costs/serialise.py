"""Plans and replans as fields of events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal.plan.costs.model import CostPrediction
from shoal.plan.costs.select import ExecutionPlan, PlanCandidate

MAX_REPORTED = 5
"""Number of rejected candidates that are reported with their reasons."""

_TIME_FIELDS = ("compute_s", "encode_s", "exchange_s", "apply_s")


def plan_fields(plan: ExecutionPlan, pick: PlanCandidate, notes: Sequence[str]) -> dict[str, Any]:
    """The choice, its prediction, the reasons, and the candidate that was not allowed."""
    named = {row.prediction.choice.name: row for row in reversed(plan.candidates) if row is not pick}
    fastest = [row for row in plan.candidates if named.get(row.prediction.choice.name) is row]
    return {
        "choice": choice_fields(pick.prediction),
        "prediction": prediction_fields(pick.prediction),
        "reason": pick.reason,
        "offer": candidate_fields(plan.offer) if plan.offer else None,
        "others": [candidate_fields(row) for row in fastest[:MAX_REPORTED]],
        "notes": list(notes),
    }


def choice_fields(it: CostPrediction) -> dict[str, Any]:
    choice = it.choice
    return {"workers": choice.workers, "hosts": choice.hosts, "threads": choice.threads, "how": choice.name}


def prediction_fields(it: CostPrediction) -> dict[str, float]:
    """Seconds and bytes of a step; the parts add up to `step_s`."""
    values = {name: getattr(it, name) for name in ("step_s", *_TIME_FIELDS, "hidden_s", "epoch_s")}
    sizes = {"sent_bytes": it.sent_bytes, "memory_bytes": it.memory_bytes}
    return {name: round_significant(value) for name, value in (values | sizes).items()}


def candidate_fields(row: PlanCandidate) -> dict[str, Any]:
    """A rejected candidate. `needs`: words that are missing in `plan.allow`."""
    needs = [] if row.allowed else list(row.changes)
    step_s = round_significant(row.prediction.step_s) if row.feasible else None
    return {**choice_fields(row.prediction), "step_s": step_s, "needs": needs, "reason": row.reason}


def round_significant(value: float) -> float:
    return float(f"{value:.4g}")
