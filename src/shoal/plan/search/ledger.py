"""What a search knows at a virtual time: its trials, and the results whose virtual end has come."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from shoal.plan.search.space import Point, Space
from shoal.plan.search.trial import TrialShape
from shoal.plan.search.values import Scores, counted, in_one_number, violation
from shoal.spec.search import ConstraintConfig, ObjectiveConfig

TrialStatus = Literal["running", "paused", "complete", "failed", "refused"]


@dataclass
class TrialState:
    """A trial as far as it is known. `origin` is the unit at which it began: 0, or that of the state it copied.

    `until` is the unit that it has reached or is on its way to. `group` is its bracket or its member of a population.
    `repeat_of`: it trains the configuration of another trial with another seed.
    """

    number: int
    point: Point
    shape: TrialShape
    status: TrialStatus = "paused"
    origin: int = 0
    until: int = 0
    rows: list[Mapping[str, float]] = field(default_factory=list)
    failure: str = ""
    group: int = 0
    copy_of: tuple[int, int] | None = None
    repeat_of: int | None = None
    why: str = ""
    curves: list[tuple[float, ...]] = field(default_factory=list)
    """All objectives after each unit, as far as they were computed."""

    @property
    def reached(self) -> int:
        """The unit up to which results are known."""
        return self.origin + len(self.rows)


@dataclass
class Ledger:
    """All trials in the order in which they were decided. Policies and samplers read it and change nothing."""

    space: Space
    objectives: Sequence[ObjectiveConfig]
    seed: int
    job_seed: int
    slots: int
    folds: bool = False
    constraints: Sequence[ConstraintConfig] = ()
    trials: list[TrialState] = field(default_factory=list)

    @property
    def taken(self) -> set[str]:
        """The configurations that were proposed already."""
        return {trial.point.key for trial in self.trials}

    @property
    def used_up(self) -> bool:
        """Whether every configuration of a space that can be counted was proposed."""
        return 0 < self.space.size <= len(self.taken)

    @property
    def several(self) -> bool:
        return len(self.objectives) > 1

    def searched(self) -> list[TrialState]:
        """Trials whose values the search chose and that were begun: no repetitions, no refused ones."""
        return [t for t in self.trials if t.repeat_of is None and t.status != "refused"]

    def generator(self, *keys: int) -> np.random.Generator:
        """Random numbers for one decision: the same in every process."""
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, *keys])))

    def values(self, trial: TrialState, unit: int | None = None) -> Scores:
        """All objectives after `unit` units; see `counted`."""
        return np.array(self.curve_at(trial, unit))

    def curve_at(self, trial: TrialState, unit: int | None = None) -> tuple[float, ...]:
        """The same as plain numbers. Computed once per unit: rows are only added."""
        for count in range(len(trial.curves), len(trial.rows)):
            rows = trial.rows[: count + 1]
            facts, how = trial.shape.facts, {"means": self.folds, "several": self.several}
            trial.curves.append(tuple(counted(goal, rows, facts, **how) for goal in self.objectives))
        place = len(trial.rows) if unit is None else min(unit - trial.origin, len(trial.rows))
        return trial.curves[place - 1] if place > 0 else (-math.inf,) * len(self.objectives)

    def violation(self, trial: TrialState) -> float:
        """By how much a trial breaks the constraints, as far as that is known."""
        return violation(self.constraints, trial.rows, trial.shape.facts, means=self.folds)

    def scores(self, trials: Sequence[TrialState], unit: int | None = None) -> Scores:
        """One number per trial, larger is better. With several objectives: the rank among these trials.

        Trials that break a constraint come after all that do not.
        """
        table = np.array([self.curve_at(trial, unit) for trial in trials]).reshape(len(trials), len(self.objectives))
        return in_one_number(table, np.array([self.violation(trial) for trial in trials]))

    def ranking(self, trials: Iterable[TrialState], unit: int | None = None) -> list[TrialState]:
        """Best first; equal ones in the order of their numbers."""
        listed = [*trials]
        scores = self.scores(listed, unit)
        order = sorted(range(len(listed)), key=lambda i: (-scores[i], listed[i].number))
        return [listed[i] for i in order]
