"""A search in virtual time: `slots` imaginary workers, whose stretches last as long as they cost.

Decisions are made in the order of virtual ends, ties by decision number. So they depend on the job and its seed only,
whatever the real workers do. With `order: clock` a result counts when it is told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shoal.plan.search.ledger import Ledger, TrialState
from shoal.plan.search.policies.base import Begin, Choice, Continue, Nothing, Policy
from shoal.plan.search.samplers.base import TrialSampler
from shoal.plan.search.space import Point
from shoal.plan.search.trial import (
    SearchEnd,
    ShapeWanted,
    Stretch,
    StretchResult,
    TrialShape,
    Wait,
)
from shoal.plan.search.winner import best_trial, unfinished_winners, wanted_repeats
from shoal.spec.search import BudgetConfig

MOST_ALIKE = 30
"""Trials from the first one on that may all fail alike, without any result, before the search ends: the job itself does
not work."""
MAX_REFUSED = 1000
"""Proposals in a row that cannot be trained or break a constraint, after which the search ends."""


@dataclass
class _Proposed:
    """A trial that waits for its shape."""

    number: int
    point: Point
    begin: Begin
    repeat_of: int | None = None


@dataclass(frozen=True)
class Improvement:
    """A new best value of the first metric (larger is better): when in virtual time, after how many trainings."""

    virtual: float
    trainings: float
    trial: int
    unit: int
    value: float


@dataclass
class VirtualSearch:
    """The state machine of `SearchPlan`. `suggestions` are tried first; `repeat` seeds for the best few at the end.

    Hours of a budget are the caller's: `close` ends the search as a used-up budget does.
    """

    ledger: Ledger
    policy: Policy
    sampler: TrialSampler
    budget: BudgetConfig
    suggestions: Sequence[Point] = ()
    repeat: int = 1
    clock_order: bool = False
    ties_first: bool = False
    """Whether all results of a virtual time count before anything is decided then."""
    now: float = 0.0
    spent: float = 0.0
    """Trainings that were decided so far, in parts of whole ones."""
    stretches: list[Stretch] = field(default_factory=list)
    history: list[Improvement] = field(default_factory=list)
    _results: dict[int, StretchResult] = field(default_factory=dict)
    _under_way: dict[int, Stretch] = field(default_factory=dict)
    _proposed: _Proposed | None = None
    _fresh: TrialState | None = None
    _refused: int = 0
    _failed_alike: int = 0
    _first_failure: str | None = None
    _closed: str = ""
    _finishing: str = ""
    _repeats: list[tuple[int, int]] | None = None
    _end: SearchEnd | None = None

    def decide(self) -> Stretch | ShapeWanted | Wait | SearchEnd:
        """The next decision; the same answer again until it was acted upon."""
        while self._end is None:
            if self._proposed is not None:
                point = self._proposed.point
                return ShapeWanted(self._proposed.number, point.changes, point.memory)
            waits = len(self._under_way) == self.ledger.slots or self._has_ties()
            made = self._pass_time() if waits else self._fill_slot()
            if made is not None:
                return made
        return self._end

    def tell_shape(self, trial: int, shape: TrialShape) -> None:
        """What the check of the proposed job found. A shape that was told already is ignored."""
        proposed = self._proposed
        if proposed is None or proposed.number != trial:
            return
        begin, self._proposed = proposed.begin, None
        state = TrialState(trial, proposed.point, shape, group=begin.group, copy_of=begin.copy_of, why=begin.why)
        state.repeat_of = proposed.repeat_of
        if begin.copy_of is not None:
            state.origin = state.until = begin.copy_of[1]
        if shape.failure or shape.units < 1:
            state.status, state.failure = "failed", shape.failure or "it has nothing to train"
            self._note_failure(StretchResult(failure=state.failure))
        elif self.ledger.violation(state) > 0:
            state.status, state.failure = "refused", "it breaks a constraint"
        self.ledger.trials.append(state)
        self._fresh = state if state.status == "paused" else None
        self._refused = 0 if self._fresh else self._refused + 1

    def tell(self, number: int, result: StretchResult) -> None:
        """The result of a stretch, in any order. A result that was told already is ignored."""
        self._results.setdefault(number, result)
        if self.clock_order and number in self._under_way:
            self._count(self._under_way[number])

    def close(self, why: str) -> None:
        """Begin nothing more: what is under way ends, and the winner is trained to its end."""
        self._closed = self._closed or why

    @property
    def under_way(self) -> list[Stretch]:
        """Stretches whose results do not count yet, the earliest virtual end first."""
        return sorted(self._under_way.values(), key=lambda s: (s.ends, s.number))

    @property
    def closed_because(self) -> str:
        """Why nothing more is begun; '' while the budget lasts."""
        if self._closed:
            return self._closed
        if self.budget.trainings is not None and self.spent >= self.budget.trainings - 1e-9:
            return f"{self.budget.trainings:g} trainings are done"
        if self._failed_alike >= MOST_ALIKE:
            return f"the first {MOST_ALIKE} trials all failed alike"
        if self._refused >= MAX_REFUSED:
            return f"{MAX_REFUSED} proposals in a row could not be trained"
        return ""

    def _fill_slot(self) -> Stretch | Wait | None:
        """A stretch for a free slot. None: look again, because a shape is wanted or time has passed."""
        if self._fresh is not None:
            trial, self._fresh = self._fresh, None
            whole = self._finishing or trial.repeat_of is not None
            return self._stretch(trial, trial.shape.units if whole else self.policy.first_end(self.ledger, trial))
        if self._finishing:
            return self._finish()
        choice = self._choose()
        if isinstance(choice, Continue):
            return self._stretch(self.ledger.trials[choice.trial], choice.end, choice.why)
        if isinstance(choice, Begin) and self._propose(choice):
            return None
        if self._under_way:
            return self._pass_time()
        self._finishing = choice.why if isinstance(choice, Nothing) else "every configuration of the space was tried"
        return None

    def _choose(self) -> Choice:
        if self.closed_because:
            return Nothing(self.closed_because)
        may_begin = self.budget.trials is None or len(self.ledger.searched()) < self.budget.trials
        choice = self.policy.decide(self.ledger, may_begin=may_begin)
        number = len(self.ledger.trials)
        if isinstance(choice, Begin) and number < len(self.suggestions):
            return replace(choice, point=self.suggestions[number], why="suggested")
        return choice

    def _propose(self, begin: Begin) -> bool:
        number = len(self.ledger.trials)
        point = begin.point or self.sampler.propose(self.ledger, number)
        if point is not None:
            self._proposed = _Proposed(number, point, begin)
        return point is not None

    def _finish(self) -> Stretch | Wait | None:
        """Train the winner to its end, then the best few with other seeds, then end."""
        unfinished = unfinished_winners(self.ledger)
        if unfinished and self._repeats is None:
            return self._stretch(unfinished[0], unfinished[0].shape.units, "winner")
        if self._under_way and not self._repeats:
            return self._pass_time()
        if self._repeats is None:
            self._repeats = wanted_repeats(self.ledger, self.repeat)
        if self._repeats:
            self._propose_repeat(*self._repeats.pop(0))
            return None
        best = best_trial(self.ledger)
        self._end = SearchEnd(None if best is None else best.number, self._finishing)
        return None

    def _propose_repeat(self, trial: int, seed: int) -> None:
        point = self.ledger.trials[trial].point
        again = Point(point.cube, {**point.changes, "seed": seed})
        begin = Begin(group=self.ledger.trials[trial].group, why=f"trial {trial} with another seed")
        self._proposed = _Proposed(len(self.ledger.trials), again, begin, repeat_of=trial)

    def _stretch(self, trial: TrialState, end: int, why: str = "") -> Stretch:
        length = (end - trial.until) / trial.shape.units
        used = {s.slot for s in self._under_way.values()}
        made = Stretch(
            number=len(self.stretches),
            slot=next(slot for slot in range(self.ledger.slots) if slot not in used),
            trial=trial.number,
            changes=trial.point.changes,
            start=trial.until,
            end=end,
            begins=self.now,
            ends=self.now + trial.shape.cost * length,
            copy_of=trial.copy_of if trial.until == trial.origin else None,
            why=why or trial.why,
        )
        trial.status, trial.until = "running", end
        self.spent += length
        self.stretches.append(made)
        self._under_way[made.number] = made
        return made

    def _has_ties(self) -> bool:
        """Whether results of this very virtual time do not count yet."""
        if not self.ties_first or self.clock_order or self._fresh is not None:
            return False
        return any(stretch.ends <= self.now for stretch in self._under_way.values())

    def _pass_time(self) -> Wait | None:
        """Count the stretch with the earliest virtual end, or wait for its result."""
        first = min(self._under_way.values(), key=lambda s: (s.ends, s.number))
        if first.number not in self._results:
            return Wait(first.number)
        self._count(first)
        return None

    def _count(self, stretch: Stretch) -> None:
        """The result of a stretch becomes known to policy and sampler."""
        del self._under_way[stretch.number]
        self.now = max(self.now, stretch.ends)
        trial, result = self.ledger.trials[stretch.trial], self._results[stretch.number]
        trial.rows.extend(result.rows[: stretch.end - stretch.start])
        self._note_failure(result)
        if result.failure:
            trial.status, trial.failure = "failed", result.failure
        elif trial.reached < stretch.end or stretch.end >= trial.shape.units:
            trial.status = "complete"
        else:
            trial.status = "paused"
        self._note_best(trial)

    def _note_failure(self, result: StretchResult) -> None:
        """Count the results from the first one on as long as they are one and the same failure."""
        kind = "" if result.rows else result.failure
        if self._first_failure is None:
            self._first_failure = kind
        elif kind != self._first_failure:
            self._first_failure = ""
        self._failed_alike = self._failed_alike + 1 if self._first_failure else 0

    def _note_best(self, trial: TrialState) -> None:
        """Remember when the first metric became better than ever."""
        value = self.ledger.curve_at(trial)[0]
        known = self.history[-1].value if self.history else -math.inf
        eligible = trial.status != "failed" and trial.repeat_of is None and self.ledger.violation(trial) == 0
        if eligible and value > known and (not self.ledger.folds or trial.status == "complete"):
            self.history.append(Improvement(self.now, self.spent, trial.number, trial.reached, value))
