"""Choose among the predicted candidates, with a reason for each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from shoal.plan.costs import explain
from shoal.plan.costs.candidates import replicated_candidates, result_changes, sharded_candidates
from shoal.plan.costs.model import Cluster, CostPrediction, MeasuredJob, NetworkLink, RunChoice
from shoal.plan.costs.predict import predict

WORTHWHILE_GAIN = 1.05
"""Minimum speed-up that is worth more processes or another result."""

SHORTER_ROUNDS_SLOWDOWN = 1.03
"""Accepted slowdown for fewer local steps per round, because shorter rounds change the result less."""

LOSSY_CODEC_GAIN = 1.3
"""Minimum speed-up for a codec that learns noticeably slower per step."""

_SYNCS_BY_SIMPLICITY = ("lanes", "local", "server")
_MILD_CODECS = ("none", "bf16", "fp16", "int8", "int4", "int3")


@dataclass(frozen=True)
class PlanCandidate:
    """A prediction with its reason. `changes` are the words of `plan.allow` that it needs; `allowed`: the job has
    them."""

    prediction: CostPrediction
    changes: tuple[str, ...]
    allowed: bool
    reason: str = ""

    @property
    def feasible(self) -> bool:
        return not self.prediction.refused


@dataclass(frozen=True)
class ExecutionPlan:
    """`candidates` from fast to slow, infeasible ones last. `pick` is None if none is feasible. `offer` is faster but
    not allowed; it changes the sharding only if nothing else is feasible."""

    candidates: tuple[PlanCandidate, ...]
    pick: PlanCandidate | None
    offer: PlanCandidate | None


def make_plan(
    own: RunChoice,
    measured: MeasuredJob,
    cluster: Cluster,
    link: NetworkLink,
    *,
    least: int = 1,
    most: int,
    allow: Collection[str] = (),
) -> ExecutionPlan:
    """Predict all candidates with `least` to `most` workers, and choose one."""
    ways = [*replicated_candidates(own, measured, cluster, most=most), *sharded_candidates(own, most=most)]
    looked_at = [predict(choice, measured, cluster, link) for choice in ways]
    few = f"the job asks for {least} workers at least"
    wanted = [it if it.choice.workers >= least else replace(it, refused=it.refused or few) for it in looked_at]
    return select_plan(wanted, own=own, allow=allow)


def select_plan(predictions: Sequence[CostPrediction], *, own: RunChoice, allow: Collection[str] = ()) -> ExecutionPlan:
    """Choose the simplest of the allowed candidates that are about as fast as the fastest."""
    rows = [_candidate(prediction, own, allow) for prediction in predictions]
    rows.sort(key=lambda row: (not row.feasible, row.prediction.step_s, _complexity(row)))
    pick = _best([row for row in rows if row.feasible and row.allowed])
    others = [row for row in rows if row.feasible and not row.allowed and not (pick and "shard" in row.changes)]
    better = [row for row in others if not pick or pick.prediction.step_s > WORTHWHILE_GAIN * row.prediction.step_s]
    offer = _best(better)
    known = {row.prediction.choice: row.prediction for row in rows if row.feasible}
    explained = {id(row): _with_reason(row, pick, known) for row in rows}
    return ExecutionPlan(
        candidates=tuple(explained[id(row)] for row in rows),
        pick=explained[id(pick)] if pick else None,
        offer=explained[id(offer)] if offer else None,
    )


def _candidate(prediction: CostPrediction, own: RunChoice, allow: Collection[str]) -> PlanCandidate:
    needs = result_changes(prediction.choice, own)
    return PlanCandidate(prediction, needs, allowed=set(needs) <= set(allow))


def _best(rows: Sequence[PlanCandidate]) -> PlanCandidate | None:
    if not rows:
        return None
    mild = [row for row in rows if row.prediction.choice.codec in _MILD_CODECS or "codecs" not in row.changes]
    if mild and LOSSY_CODEC_GAIN * _fastest(rows) >= _fastest(mild):
        rows = mild
    near = _within(WORTHWHILE_GAIN, rows)
    simplest = min(near, key=_complexity)
    alike = [row for row in near if _ignoring_rounds(row) == _ignoring_rounds(simplest)]
    return min(_within(SHORTER_ROUNDS_SLOWDOWN, alike), key=lambda row: (len(row.changes), row.prediction.choice.every))


def _within(times: float, rows: Sequence[PlanCandidate]) -> list[PlanCandidate]:
    """The candidates that take at most `times` as long as the fastest."""
    return [row for row in rows if row.prediction.step_s <= times * _fastest(rows)]


def _fastest(rows: Sequence[PlanCandidate]) -> float:
    return min(row.prediction.step_s for row in rows)


def _ignoring_rounds(row: PlanCandidate) -> RunChoice:
    return replace(row.prediction.choice, every=1, settle=1)


def _complexity(row: PlanCandidate) -> tuple[float, ...]:
    """Sort key: simpler candidates, and those closer to the job's own result, come first."""
    it = row.prediction.choice
    busy = it.workers * it.threads + it.servers
    mild = _MILD_CODECS.index(it.codec) if it.codec in _MILD_CODECS else len(_MILD_CODECS)
    return len(row.changes), it.hosts, busy, _SYNCS_BY_SIMPLICITY.index(it.sync), mild, row.prediction.step_s


def _with_reason(
    row: PlanCandidate, pick: PlanCandidate | None, known: dict[RunChoice, CostPrediction]
) -> PlanCandidate:
    if row is pick:
        text = explain.why_chosen(row.prediction, known)
    else:
        better = pick.prediction if pick else None
        needs = () if row.allowed else row.changes
        text = explain.why_not_chosen(row.prediction, better, known, needs=needs)
    return PlanCandidate(row.prediction, row.changes, row.allowed, text)
