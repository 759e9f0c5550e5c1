"""What the workers found when they computed a step again, and what follows from it: pure functions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from shoal.events.checks import make_check
from shoal.net.errors import LinkError

MIN_STEP_S = 1e-6


@dataclass(frozen=True)
class CheckReport:
    """One worker's part of a check. It trained `lane`, and computed `checked_lane` again with new objects.

    '' or an empty list stands for a lane without samples, or for what could not be done because of `failure`.
    `all_checks_s` and `trained_s` are the sums since the worker's process started; `step_s` is the time of one step.
    """

    lane: int
    lane_sum: str = ""
    batch: str = ""
    checked_lane: int = 0
    checked_sums: list[str] = field(default_factory=list)
    checked_batch: str = ""
    weights: str = ""
    update_differs: list[str] = field(default_factory=list)
    failure: str = ""
    check_s: float = 0.0
    all_checks_s: float = 0.0
    trained_s: float = 0.0
    step_s: float = 0.0

    def pack(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpack(cls, content: bytes) -> CheckReport:
        """LinkError if it is no report."""
        try:
            found = json.loads(content)
        except (ValueError, RecursionError) as failure:
            raise LinkError("sent a report that is not JSON") from failure
        if not _is_report(found):
            raise LinkError("sent a report with fields that are missing, unknown or of the wrong type")
        return cls(**found)


_is_report = make_check(CheckReport)


@dataclass(frozen=True)
class Verdict:
    """`lanes` were compared. `why` says what differs, `failure` why nothing could be compared."""

    lanes: int = 0
    why: str = ""
    failure: str = ""


def judge(step: int, reports: Mapping[int, CheckReport]) -> Verdict:
    """The verdict on a step, from the reports by seat."""
    trained = {report.lane: (seat, report) for seat, report in reports.items()}
    compared = {
        seat: report
        for seat, report in reports.items()
        if len(report.checked_sums) == 2 and report.checked_lane in trained and trained[report.checked_lane][1].lane_sum
    }
    differences = [
        *(_update_difference(step, seat, report) for seat, report in reports.items()),
        *(_lane_difference(step, seat, report, *trained[report.checked_lane]) for seat, report in compared.items()),
        "" if len({r.weights for r in reports.values()}) == 1 else f"after step {step} the workers' weights differ",
    ]
    why = next(filter(None, differences), "")
    failure = next((report.failure for report in reports.values() if report.failure), "")
    return Verdict(len(compared), why, "" if why or compared else failure)


def _update_difference(step: int, seat: int, report: CheckReport) -> str:
    parts = ", ".join(report.update_differs)
    return (
        f"the update of step {step}, made again with new objects on worker-{seat}, differs in {parts}" if parts else ""
    )


def _lane_difference(step: int, seat: int, report: CheckReport, trainer: int, trained: CheckReport) -> str:
    lane = f"lane {report.checked_lane} of step {step}"
    if report.checked_batch != trained.batch:
        return f"{lane} has other samples when worker-{seat} reads it again"
    if report.checked_sums[0] != trained.lane_sum:
        return f"{lane}, computed again with new objects on worker-{seat}, has other bits than on worker-{trainer}"
    if report.checked_sums[1] != report.checked_sums[0]:
        return f"{lane} has other bits each time that worker-{seat} computes it with the same objects"
    return ""


def steps_until_next(reports: Mapping[int, CheckReport], *, share: float) -> int:
    """The number of steps after which one more check keeps all checks within this share of the time."""
    spent_s = max(report.all_checks_s + report.check_s for report in reports.values())
    trained_s = min(report.trained_s for report in reports.values())
    step_s = max(report.step_s for report in reports.values()) or MIN_STEP_S
    return max(1, math.ceil((spent_s / share - trained_s) / step_s))
