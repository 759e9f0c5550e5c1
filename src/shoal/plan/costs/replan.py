"""Replan a run while it trains: detect that step times have drifted, and choose changes that keep the result.

Drift is judged over a window of steps, and the cooldown between two replans grows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from shoal.errors import plural
from shoal.plan.costs.calibration import CostInputs, ObservedTimes, calibrate
from shoal.plan.costs.candidates import replicated_candidates
from shoal.plan.costs.model import CostPrediction, RunChoice
from shoal.plan.costs.predict import predict
from shoal.plan.costs.select import ExecutionPlan, PlanCandidate, select_plan
from shoal.plan.costs.units import format_milliseconds

MOVE_GAIN = 1.2
"""Minimum predicted speed-up before another number of workers is tried."""

_TIME_FIELDS = ("compute_s", "encode_s", "exchange_s", "apply_s", "hidden_s")
ObservedStepTimes = Mapping[tuple[int, int], float]
"""Measured step time by (workers, hosts)."""

DRIFT_FACTOR = 1.5
"""Measured and predicted step time may differ by this factor before a replan."""

WINDOW, FEWEST_ROWS, LONG_S = 20, 5, 10.0
"""Measurements in the window; fewer are enough, down to `FEWEST_ROWS`, if they cover `LONG_S` seconds."""

COOLDOWN_STEPS, MAX_DOUBLINGS = 100, 6
"""Steps between two replans (or `LONG_S` seconds), doubled after each replan up to `MAX_DOUBLINGS` times."""


@dataclass(frozen=True)
class Replan:
    """`current` is the calibrated prediction of the present choice. `move_to` is the same choice with another number of
    workers, if that is faster. `best` is what a new run would choose. `why` explains all three."""

    current: CostPrediction
    move_to: CostPrediction | None
    best: PlanCandidate | None
    why: str

    @property
    def expected_step_s(self) -> float:
        return (self.move_to or self.current).step_s


def replan(
    current: RunChoice,
    inputs: CostInputs,
    observed: ObservedTimes,
    *,
    least: int = 1,
    most: int,
    allow: Collection[str] = (),
    seen: ObservedStepTimes | None = None,
) -> Replan:
    """`least` and `most` are the numbers of workers that the job allows on the driver's host. `seen` step times replace
    predictions."""
    calibrated = calibrate(current, inputs, observed)
    own = replace(current, workers=1, hosts=1)
    looked_at = replicated_candidates(
        own, calibrated.measured, calibrated.cluster, most=most + sum(observed.workers_per_host[1:])
    )
    known = {**(seen or {}), (current.workers, current.hosts): observed.step_s}
    predictions = [
        _scaled_to_observed(predict(choice, calibrated.measured, calibrated.cluster, calibrated.link), current, known)
        for choice in [*looked_at, current]
        if choice == current or _allowed_size(choice, observed, least=least, most=most)
    ]
    plan = select_plan(list(dict.fromkeys(predictions)), own=own, allow=allow)
    stays = next(row.prediction for row in plan.candidates if row.prediction.choice == current)
    moves = _faster_size(plan, current, stays)
    best = plan.pick if plan.pick and plan.pick.prediction.choice != (moves or stays).choice else None
    return Replan(stays, moves, best, _reason(stays, moves, best))


def _allowed_size(choice: RunChoice, observed: ObservedTimes, *, least: int, most: int) -> bool:
    """Whether the choice uses all joined hosts, or only the driver's host."""
    mine, brought = observed.workers_per_host[0], sum(observed.workers_per_host[1:])
    if choice.hosts == len(observed.workers_per_host):
        return least <= choice.workers - brought <= max(most, mine) and choice.workers > brought
    return choice.hosts == 1 and least <= choice.workers <= max(most, mine)


def _scaled_to_observed(it: CostPrediction, current: RunChoice, known: ObservedStepTimes) -> CostPrediction:
    """The prediction with all times scaled to the measured step time."""
    seen_s = known.get((it.choice.workers, it.choice.hosts))
    if seen_s is None or not _same_but_for_workers(it.choice, current) or it.refused:
        return it
    factor = seen_s / it.step_s
    return replace(it, **{name: factor * getattr(it, name) for name in _TIME_FIELDS})


def _same_but_for_workers(choice: RunChoice, current: RunChoice) -> bool:
    """Whether the choices differ at most in the number of workers and hosts."""
    return replace(choice, workers=current.workers, hosts=current.hosts) == current


def _faster_size(plan: ExecutionPlan, current: RunChoice, stays: CostPrediction) -> CostPrediction | None:
    """The same choice with another number of workers, if it is `MOVE_GAIN` times as fast."""
    like = [
        row.prediction
        for row in plan.candidates
        if row.feasible and _same_but_for_workers(row.prediction.choice, current)
    ]
    best = min(like, key=lambda it: it.step_s, default=None)
    return best if best and best.choice != current and stays.step_s > MOVE_GAIN * best.step_s else None


def _reason(stays: CostPrediction, moves: CostPrediction | None, best: PlanCandidate | None) -> str:
    if moves:
        text = f"{_describe(moves.choice)} should take {format_milliseconds(moves.step_s)} for a step"
    else:
        text = f"no other number of workers is {MOVE_GAIN:g} times as fast"
    if best is None:
        return text
    took = format_milliseconds(best.prediction.step_s)
    return f"{text}; a new run would take {_describe(best.prediction.choice)}: {took}"


def _describe(choice: RunChoice) -> str:
    hosts = f" on {choice.hosts} hosts" if choice.hosts > 1 else ""
    return f"{plural(choice.workers, 'worker')}{hosts} ({choice.name})"


def typical_step_s(taken: Sequence[tuple[int, float]]) -> float | None:
    """Median step time over the newest (steps, seconds) measurements; None if there are too few."""
    newest = [row for row in taken if row[0]][-WINDOW:]
    if len(newest) < WINDOW and (len(newest) < FEWEST_ROWS or sum(seconds for _, seconds in newest) < LONG_S):
        return None
    return median(seconds / steps for steps, seconds in newest)


def has_drifted(expected_s: float, measured_s: float) -> bool:
    """Whether measured and expected step time differ by more than `DRIFT_FACTOR`."""
    return not expected_s / DRIFT_FACTOR <= measured_s <= expected_s * DRIFT_FACTOR


def cooldown_over(steps: int, seconds: float, replans: int) -> bool:
    """Whether enough steps or seconds have passed since the last replan."""
    times = 1 << min(replans, MAX_DOUBLINGS)
    return steps >= times * COOLDOWN_STEPS or seconds >= times * LONG_S
