"""What was planned for a run, and what became of it, in some lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.events import Picture
from shoal.events.picture import chosen
from shoal.plan.costs.sentences import milliseconds

MOST_TOLD = 3
_PARTS = {"compute_s": "compute", "encode_s": "coding", "exchange_s": "exchange", "apply_s": "update"}


def lines(picture: Picture) -> list[str]:
    """Nothing for a run whose job said itself how to run it."""
    plan = picture.plan
    if not plan:
        return []
    found = [f"plan: {chosen(plan['choice'])}: {plan['reason']}", f"  expected: {_parts(plan['prediction'])}"]
    if offer := plan.get("offer"):
        found.append(f"  not allowed: {chosen(offer)}: {offer['reason']}")
    for one in picture.replans[-MOST_TOLD:]:
        said, true = (milliseconds(one[what]["step_s"]) for what in ("prediction", "truth"))
        found.append(f"  again, with {chosen(one['choice'])}: a step took {true} instead of {said}; {one['reason']}")
    return found


def _parts(prediction: Mapping[str, Any]) -> str:
    parts = [f"{word} {milliseconds(prediction[name])}" for name, word in _PARTS.items() if prediction[name]]
    return f"a step in {milliseconds(prediction['step_s'])}: {', '.join(parts)}"
