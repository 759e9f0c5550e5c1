"""The plan of a run and its replans, in a few lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.events import RunState
from shoal.plan.costs.units import format_milliseconds
from shoal.terminal.notes import describe_choice

MAX_REPLANS = 3
_TIME_NAMES = {"compute_s": "compute", "encode_s": "coding", "exchange_s": "exchange", "apply_s": "update"}


def plan_lines(state: RunState) -> list[str]:
    """Empty for a run that was not planned."""
    plan = state.plan
    if not plan:
        return []
    found = [
        f"plan: {describe_choice(plan['choice'])}: {plan['reason']}",
        f"  expected: {_describe_prediction(plan['prediction'])}",
    ]
    if offer := plan.get("offer"):
        found.append(f"  not allowed: {describe_choice(offer)}: {offer['reason']}")
    for one in state.replans[-MAX_REPLANS:]:
        said, true = (format_milliseconds(one[what]["step_s"]) for what in ("prediction", "truth"))
        found.append(
            f"  again, with {describe_choice(one['choice'])}: a step took {true} instead of {said}; {one['reason']}"
        )
    return found


def _describe_prediction(prediction: Mapping[str, Any]) -> str:
    parts = [
        f"{word} {format_milliseconds(prediction[name])}" for name, word in _TIME_NAMES.items() if prediction[name]
    ]
    return f"a step in {format_milliseconds(prediction['step_s'])}: {', '.join(parts)}"
