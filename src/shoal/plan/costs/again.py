"""A plan that is made again while a run goes on: what may change without effect on the result, and what should."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from shoal.plan.costs.candidates import candidates
from shoal.plan.costs.choose import Plan, Row, choose
from shoal.plan.costs.facts import Choice, Prediction
from shoal.plan.costs.predict import predict
from shoal.plan.costs.sentences import milliseconds
from shoal.plan.costs.truth import Setting, Truth, corrected

MOVE = 1.2
"""So many times as fast another number of workers must look to be tried."""

_PARTS = ("compute_s", "encode_s", "exchange_s", "apply_s", "hidden_s")
Seen = Mapping[tuple[int, int], float]
"""What a step took with so many workers on so many hosts, where that was seen."""


@dataclass(frozen=True)
class Again:
    """`stays` is what goes on now, with the facts put right. `moves` is the number of workers to take instead, if any.
    `best` would be taken by a run that starts now. `why` says all that."""

    stays: Prediction
    moves: Prediction | None
    best: Row | None
    why: str

    @property
    def expects_s(self) -> float:
        return (self.moves or self.stays).step_s


def again(
    now: Choice,
    setting: Setting,
    truth: Truth,
    *,
    least: int = 1,
    most: int,
    allow: Collection[str] = (),
    seen: Seen | None = None,
) -> Again:
    """`least` and `most` are how many workers the job allows on the driver's host. Where another number was seen, what
    was seen counts, and not what is predicted."""
    there = corrected(now, setting, truth)
    own = replace(now, workers=1, hosts=1)
    looked_at = candidates(own, there.measured, there.machine, most=most + sum(truth.numbers[1:]))
    known = {**(seen or {}), (now.workers, now.hosts): truth.step_s}
    predictions = [
        _as_seen(predict(choice, there.measured, there.machine, there.link), now, known)
        for choice in [*looked_at, now]
        if choice == now or _fits(choice, truth, least=least, most=most)
    ]
    plan = choose(list(dict.fromkeys(predictions)), own=own, allow=allow)
    stays = next(row.prediction for row in plan.rows if row.prediction.choice == now)
    moves = _moves(plan, now, stays)
    best = plan.pick if plan.pick and plan.pick.prediction.choice != (moves or stays).choice else None
    return Again(stays, moves, best, _why(stays, moves, best))


def _fits(choice: Choice, truth: Truth, *, least: int, most: int) -> bool:
    """Hosts are taken as they came, all or none but the driver's."""
    mine, brought = truth.numbers[0], sum(truth.numbers[1:])
    if choice.hosts == len(truth.numbers):
        return least <= choice.workers - brought <= max(most, mine) and choice.workers > brought
    return choice.hosts == 1 and least <= choice.workers <= max(most, mine)


def _as_seen(it: Prediction, now: Choice, known: Seen) -> Prediction:
    """All of it as much longer or shorter as the step was."""
    seen_s = known.get((it.choice.workers, it.choice.hosts))
    if seen_s is None or not _like(it.choice, now) or it.refused:
        return it
    factor = seen_s / it.step_s
    return replace(it, **{name: factor * getattr(it, name) for name in _PARTS})


def _like(choice: Choice, now: Choice) -> bool:
    """The same way, if need be with other workers."""
    return replace(choice, workers=now.workers, hosts=now.hosts) == now


def _moves(plan: Plan, now: Choice, stays: Prediction) -> Prediction | None:
    """The same way with other workers, if it is so much faster."""
    like = [row.prediction for row in plan.rows if row.possible and _like(row.prediction.choice, now)]
    best = min(like, key=lambda it: it.step_s, default=None)
    return best if best and best.choice != now and stays.step_s > MOVE * best.step_s else None


def _why(stays: Prediction, moves: Prediction | None, best: Row | None) -> str:
    if moves:
        said = f"{_named(moves.choice)} should take {milliseconds(moves.step_s)} for a step"
    else:
        said = f"no other number of workers is {MOVE:g} times as fast"
    if best is None:
        return said
    return f"{said}; a new run would take {_named(best.prediction.choice)}: {milliseconds(best.prediction.step_s)}"


def _named(choice: Choice) -> str:
    hosts = f" on {choice.hosts} hosts" if choice.hosts > 1 else ""
    return f"{choice.workers} worker{'s' if choice.workers > 1 else ''}{hosts} ({choice.name})"
