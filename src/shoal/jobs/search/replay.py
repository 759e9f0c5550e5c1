"""Making the decisions of a journal again, so that a new driver continues where an earlier one was killed.

The plan is pure, so it decides the same again. Values of trials come from the journal, because a model-based sampler
takes its time. Whether it would propose them again is checked afterwards, while the trials train: with another
processor or version it may not. Then the journal counts, and the difference is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shoal.errors import ShoalError, error
from shoal.jobs.search.journal import AnyRow, ClosedRow, DecidedRow, DifferenceRow, ShapeRow, ToldRow, rows_of
from shoal.jobs.search.start_values import values_by_key
from shoal.plan.search.ledger import Ledger
from shoal.plan.search.samplers.base import TrialSampler
from shoal.plan.search.space import Point, Space
from shoal.plan.search.trial import ShapeWanted, Stretch
from shoal.plan.search.virtual import VirtualSearch


def replay(plan: VirtualSearch, rows: Sequence[AnyRow]) -> dict[int, Stretch]:
    """Repeat the calls that led to these rows, in the same order. Returns the stretches without a result. SH630 if the
    plan decides otherwise."""
    sampler = plan.sampler
    plan.sampler = RecordedSampler(_shapes(rows))
    unfinished: dict[int, Stretch] = {}
    for stretch in _repeat(plan, rows):
        if stretch is not None:
            unfinished[stretch.number] = stretch
    plan.sampler = sampler
    told = {row.number for row in rows_of(rows, ToldRow)}
    return {number: stretch for number, stretch in unfinished.items() if number not in told}


def check_again(plan: VirtualSearch, rows: Sequence[AnyRow]) -> Iterator[DifferenceRow | None]:
    """Repeat the calls with a fresh plan, one row at a time. Yields where it would propose other values than the
    journal has, unless the journal tells so already; else None."""
    known = {row.trial for row in rows_of(rows, DifferenceRow)}
    checked = plan.sampler = RecordedSampler(_shapes(rows), plan.sampler)
    for _ in _repeat(plan, rows):
        found = checked.take_differences()
        yield next((row for row in found if row.trial not in known), None)


def _shapes(rows: Sequence[AnyRow]) -> dict[int, ShapeRow]:
    return {row.trial: row for row in rows_of(rows, ShapeRow)}


def _repeat(plan: VirtualSearch, rows: Sequence[AnyRow]) -> Iterator[Stretch | None]:
    """The stretch of each row that is a decision; None for other rows."""
    shapes = _shapes(rows)
    for row in rows:
        if isinstance(row, DecidedRow):
            yield _decide_again(plan, row, shapes)
        elif isinstance(row, ToldRow):
            plan.tell(row.number, row.result)
        elif isinstance(row, ClosedRow):
            plan.close(row.why)
        yield None


def _decide_again(plan: VirtualSearch, row: DecidedRow, shapes: Mapping[int, ShapeRow]) -> Stretch:
    while True:
        decision = plan.decide()
        if isinstance(decision, ShapeWanted) and decision.trial in shapes:
            shape = shapes[decision.trial]
            if dict(decision.changes) != shape.changes:
                raise _other_decision(row.number, f"trial {decision.trial} would get {dict(decision.changes)}")
            plan.tell_shape(decision.trial, shape.shape)
        elif isinstance(decision, Stretch):
            if _key(decision) != _key(row.stretch):
                raise _other_decision(row.number, f"it would be trial {decision.trial} up to unit {decision.end}")
            return decision
        else:
            raise _other_decision(row.number, f"it would be {type(decision).__name__}")


def _key(stretch: Stretch) -> tuple[Any, ...]:
    return stretch.number, stretch.slot, stretch.trial, stretch.start, stretch.end, dict(stretch.changes)


def _other_decision(number: int, what: str) -> ShoalError:
    return error("SH630", f"decision {number} would be another one now: {what}", where="search.jsonl")


class RecordedSampler:
    """Proposes what the journal has. `checked`, if given, is asked too, and where it differs is noted."""

    def __init__(self, shapes: Mapping[int, ShapeRow], checked: TrialSampler | None = None) -> None:
        self._shapes = shapes
        self._checked = checked
        self._differences: list[DifferenceRow] = []

    def propose(self, ledger: Ledger, number: int) -> Point | None:
        recorded = self._shapes.get(number)
        if recorded is None:
            return None  # the journal ends here
        if self._checked is not None:
            point = self._checked.propose(ledger, number)
            proposed = {} if point is None else dict(point.changes)
            if proposed != recorded.changes:
                self._differences.append(DifferenceRow(trial=number, proposed=proposed))
        return replace(point_of(ledger.space, recorded.changes), memory=tuple(recorded.memory))

    def take_differences(self) -> list[DifferenceRow]:
        found, self._differences = self._differences, []
        return found


def point_of(space: Space, changes: Mapping[str, Any]) -> Point:
    """The point whose changes these are. SH631 if they are no values of the space."""
    try:
        return space.suggest(values_by_key(changes, space.dimensions))
    except (TypeError, ValueError, LookupError, ArithmeticError, StopIteration) as failure:
        what = f"a trial has the values {str(dict(changes))[:200]}, which are not in the space"
        raise error("SH631", what, where="search.jsonl") from failure
