"""Which of the predicted ways to take, and what to say of the others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from shoal.plan.costs import reasons
from shoal.plan.costs.candidates import candidates, changes, sharded
from shoal.plan.costs.facts import Choice, Link, Machine, Measured, Prediction
from shoal.plan.costs.predict import predict

GAIN = 1.05
"""So many times as fast at least something must be to be worth more processes, or another result."""

HARDLY = 1.03
"""So many times as long rounds of fewer local steps may take: they change the result less."""

HARSH = 1.3
"""So many times as fast a codec must be that learns noticeably slower, step by step."""

_SIMPLE = ("lanes", "local", "server")
_MILD = ("none", "bf16", "fp16", "int8", "int4", "int3")


@dataclass(frozen=True)
class Row:
    """A prediction with its reason. `changes` are the words of `plan.allow` that it needs; `allowed`: it has them."""

    prediction: Prediction
    changes: tuple[str, ...]
    allowed: bool
    reason: str = ""

    @property
    def possible(self) -> bool:
        return not self.prediction.refused


@dataclass(frozen=True)
class Plan:
    """`rows` from fast to slow, those that cannot be at the end. `pick` is None if none can. `offer` would be faster
    and is not allowed; with a shard, or without, only where nothing else can be."""

    rows: tuple[Row, ...]
    pick: Row | None
    offer: Row | None


def plan(
    own: Choice,
    measured: Measured,
    machine: Machine,
    link: Link,
    *,
    least: int = 1,
    most: int,
    allow: Collection[str] = (),
) -> Plan:
    """Predict all candidates with `least` to `most` workers, and choose."""
    ways = [*candidates(own, measured, machine, most=most), *sharded(own, most=most)]
    looked_at = [predict(choice, measured, machine, link) for choice in ways]
    few = f"the job asks for {least} workers at least"
    wanted = [it if it.choice.workers >= least else replace(it, refused=it.refused or few) for it in looked_at]
    return choose(wanted, own=own, allow=allow)


def choose(predictions: Sequence[Prediction], *, own: Choice, allow: Collection[str] = ()) -> Plan:
    """The simplest among those that are about as fast as the fastest of what is allowed."""
    rows = [_row(prediction, own, allow) for prediction in predictions]
    rows.sort(key=lambda row: (not row.possible, row.prediction.step_s, _effort(row)))
    pick = _best([row for row in rows if row.possible and row.allowed])
    others = [row for row in rows if row.possible and not row.allowed and not (pick and "shard" in row.changes)]
    better = [row for row in others if not pick or pick.prediction.step_s > GAIN * row.prediction.step_s]
    offer = _best(better)
    known = {row.prediction.choice: row.prediction for row in rows if row.possible}
    told = {id(row): _told(row, pick, known) for row in rows}
    return Plan(
        rows=tuple(told[id(row)] for row in rows),
        pick=told[id(pick)] if pick else None,
        offer=told[id(offer)] if offer else None,
    )


def _row(prediction: Prediction, own: Choice, allow: Collection[str]) -> Row:
    needs = changes(prediction.choice, own)
    return Row(prediction, needs, allowed=set(needs) <= set(allow))


def _best(rows: Sequence[Row]) -> Row | None:
    if not rows:
        return None
    mild = [row for row in rows if row.prediction.choice.codec in _MILD or "codecs" not in row.changes]
    if mild and HARSH * _fastest(rows) >= _fastest(mild):
        rows = mild
    near = _within(GAIN, rows)
    simplest = min(near, key=_effort)
    alike = [row for row in near if _but_for_rounds(row) == _but_for_rounds(simplest)]
    return min(_within(HARDLY, alike), key=lambda row: (len(row.changes), row.prediction.choice.every))


def _within(times: float, rows: Sequence[Row]) -> list[Row]:
    """Those that take at most so many times as long as the fastest of them."""
    return [row for row in rows if row.prediction.step_s <= times * _fastest(rows)]


def _fastest(rows: Sequence[Row]) -> float:
    return min(row.prediction.step_s for row in rows)


def _but_for_rounds(row: Row) -> Choice:
    return replace(row.prediction.choice, every=1, settle=1)


def _effort(row: Row) -> tuple[float, ...]:
    """What comes first is simpler, and closer to the result of the job as it stands."""
    it = row.prediction.choice
    busy = it.workers * it.threads + it.servers
    mild = _MILD.index(it.codec) if it.codec in _MILD else len(_MILD)
    return len(row.changes), it.hosts, busy, _SIMPLE.index(it.sync), mild, row.prediction.step_s


def _told(row: Row, pick: Row | None, known: dict[Choice, Prediction]) -> Row:
    if row is pick:
        text = reasons.for_it(row.prediction, known)
    else:
        better = pick.prediction if pick else None
        needs = () if row.allowed else row.changes
        text = reasons.against(row.prediction, better, known, needs=needs)
    return Row(row.prediction, row.changes, row.allowed, text)
