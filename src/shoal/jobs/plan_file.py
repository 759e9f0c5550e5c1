"""A plan as it lies in a run's directory, beside the job that came of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shoal.plan.costs.inputs import PlanRequest
from shoal.spec.run_paths import RunPaths, write_atomically


@dataclass(frozen=True)
class PlanFile:
    """What was measured, what it was planned for, and what the run tells of the plan."""

    facts: Mapping[str, Any]
    wanted: PlanRequest
    told: Mapping[str, Any]

    def write(self, paths: RunPaths) -> None:
        write_atomically(paths.plan, json.dumps(asdict(self), indent=1) + "\n")


def read_plan_file(paths: RunPaths) -> PlanFile | None:
    """None for a run whose job said itself how to run it."""
    if not paths.plan.is_file():
        return None
    found = json.loads(paths.plan.read_text(encoding="utf-8"))
    wanted = found["wanted"] | {"speeds": tuple(found["wanted"]["speeds"])}
    return PlanFile(found["facts"], PlanRequest(**wanted), found["told"])
