"""The plan of a `sync: auto` run, stored in the run directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shoal.events.schema import KINDS
from shoal.plan.costs.inputs import PlanRequest, read_cluster, read_link, read_measured
from shoal.spec.run_paths import RunPaths, write_atomically


@dataclass(frozen=True)
class PlanFile:
    """The measurements (`facts`), the request (`wanted`), and the fields of the run's `plan` event (`told`)."""

    facts: Mapping[str, Any]
    wanted: PlanRequest
    told: Mapping[str, Any]

    def write(self, paths: RunPaths) -> None:
        write_atomically(paths.plan, json.dumps(asdict(self), indent=1) + "\n")


def read_plan_file(paths: RunPaths) -> PlanFile | None:
    """None for a run that was not planned, or whose file is damaged: the run is then not planned again."""
    try:
        found = json.loads(paths.plan.read_text(encoding="utf-8"))
        wanted = found["wanted"] | {"speeds": tuple(found["wanted"]["speeds"])}
        plan = PlanFile(found["facts"], PlanRequest(**wanted), found["told"])
        read_measured(plan.facts), read_cluster(plan.facts, plan.wanted), read_link(plan.facts, plan.wanted)
        return plan if KINDS["plan"].accepts(plan.told) else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return None
