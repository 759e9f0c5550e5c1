"""The trials of a search as its journal tells them. No I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from shoal.jobs.search.journal import AnyRow, DecidedRow, EndedRow, ForgottenRow, ShapeRow, StartedRow, ToldRow
from shoal.plan.search.make import objectives
from shoal.plan.search.values import counted, in_one_number, violation
from shoal.spec.job import Job
from shoal.spec.receipt import mean_of
from shoal.spec.search import ConstraintConfig, ObjectiveConfig

TrialPhase = Literal["proposed", "running", "paused", "complete", "failed"]


@dataclass
class TrialEntry:
    """One trial. `unit` of `units` is done; `target` is the unit that it trains to."""

    number: int
    changes: Mapping[str, Any]
    units: int = 0
    cost: float = 0.0
    unit: int = 0
    target: int = 0
    state: TrialPhase = "proposed"
    rows: list[Mapping[str, float]] = field(default_factory=list)
    facts: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    machine: bool = False
    why: str = ""
    copy_of: tuple[int, int] | None = None
    forgotten: bool = False

    @property
    def done(self) -> float:
        """The part of a whole training that it has done: a copy begins with what another trial has done."""
        begun_at = self.copy_of[1] if self.copy_of else 0
        return (self.unit - begun_at) / self.units if self.units else 0.0

    @property
    def cost_so_far(self) -> float:
        """Of what is done."""
        return self.cost * self.done

    @property
    def standard_errors(self) -> dict[str, float]:
        """Of the mean over folds or seeds."""
        return mean_and_error(self.rows)[1]


def mean_and_error(rows: Sequence[Mapping[str, float]]) -> tuple[dict[str, float], dict[str, float]]:
    """The mean of each metric over folds or seeds, and its standard error where there are two or more."""
    means, errors = {}, {}
    for name in rows[0] if rows else ():
        found = [row[name] for row in rows if math.isfinite(row.get(name, math.nan))]
        if found:
            means[name] = mean_of(found)
        if len(found) > 1:
            errors[name] = _standard_error(found, means[name])
    return means, errors


def _standard_error(values: Sequence[float], mean: float) -> float:
    try:
        spread = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    except OverflowError:  # it is larger than any float
        return math.inf
    return math.sqrt(spread / len(values))


@dataclass
class SearchTable:
    """All trials, by number. `apply` takes the rows of the journal in their order."""

    trials: dict[int, TrialEntry] = field(default_factory=dict)
    decisions: dict[int, DecidedRow] = field(default_factory=dict)
    told: dict[int, ToldRow] = field(default_factory=dict)
    starts: int = 0
    ended: EndedRow | None = None

    @classmethod
    def of(cls, rows: Sequence[AnyRow]) -> SearchTable:
        table = cls()
        for row in rows:
            table.apply(row)
        return table

    def apply(self, row: AnyRow) -> None:
        match row:
            case StartedRow():
                self.starts += 1
            case ShapeRow():
                self._shape(row)
            case DecidedRow():
                self._decided(row)
            case ToldRow():
                self._told(row)
            case ForgottenRow() if row.trial in self.trials:
                self.trials[row.trial].forgotten = True
            case EndedRow():
                self.ended = row

    def _shape(self, row: ShapeRow) -> None:
        state: TrialPhase = "failed" if row.failure else "proposed"
        self.trials[row.trial] = TrialEntry(
            row.trial,
            row.changes,
            units=row.units,
            cost=row.cost,
            facts=row.facts,
            failure=row.failure,
            machine=row.machine,
            state=state,
        )

    def _decided(self, row: DecidedRow) -> None:
        self.decisions[row.number] = row
        trial = self.trials.setdefault(row.trial, TrialEntry(row.trial, row.changes))
        trial.state, trial.target, trial.forgotten = "running", row.end, False
        trial.unit = max(trial.unit, row.start)
        trial.why = row.why or trial.why
        trial.copy_of = row.copy_of or trial.copy_of

    def _told(self, row: ToldRow) -> None:
        decided = self.decisions.get(row.number)
        if decided is None or row.number in self.told:
            return
        self.told[row.number] = row
        trial = self.trials[decided.trial]
        trial.rows += row.rows
        trial.unit = decided.start + len(row.rows)
        trial.failure, trial.machine = row.failure, row.machine
        short = trial.unit < decided.end
        whole = bool(trial.units) and trial.unit >= trial.units
        trial.state = "failed" if row.failure else "complete" if short or whole else "paused"

    @property
    def spent(self) -> float:
        """Trainings that were done, in parts of whole ones."""
        return sum(trial.done for trial in self.trials.values())


@dataclass(frozen=True)
class Judge:
    """What the trials of a search are worth, as its plan counts them. `means`: over folds or seeds. `repeated`: the
    best few are trained with other seeds at the end."""

    objectives: Sequence[ObjectiveConfig]
    constraints: Sequence[ConstraintConfig] = ()
    means: bool = False
    repeated: bool = False

    @classmethod
    def of(cls, job: Job) -> Judge:
        assert job.search is not None
        return cls(objectives(job), job.search.constraints, job.averages_runs, job.search.repeat > 1)

    def value(self, trial: TrialEntry, objective: int = 0) -> float:
        """As the metric is written; nan if there is none."""
        score = self.score(trial, objective)
        return self.objectives[objective].sign * score if math.isfinite(score) else math.nan

    def score(self, trial: TrialEntry, objective: int = 0, *, unit: int | None = None) -> float:
        """Larger is better; -inf if there is none. `unit`: after so many units, in place of all."""
        rows, several = trial.rows[:unit], len(self.objectives) > 1
        return counted(self.objectives[objective], rows, trial.facts, means=self.means, several=several)

    def scores(self, trials: Sequence[TrialEntry], unit: int) -> dict[int, float]:
        """By number, how the plan ranks these trials after so many units: larger is better."""
        goals = range(len(self.objectives))
        table = np.array([[self.score(t, goal, unit=unit) for goal in goals] for t in trials])
        broken = np.array([violation(self.constraints, t.rows, t.facts, means=self.means) for t in trials])
        return dict(zip((t.number for t in trials), in_one_number(table, broken).tolist(), strict=True))

    def values(self, trial: TrialEntry) -> dict[str, float]:
        return {goal.metric: self.value(trial, i) for i, goal in enumerate(self.objectives)}

    def breaks(self, trial: TrialEntry) -> bool:
        """Whether it breaks a constraint, so that it cannot win."""
        return violation(self.constraints, trial.rows, trial.facts, means=self.means) > 0

    def best(self, table: SearchTable) -> TrialEntry | None:
        """The best trial so far that can win: it breaks no constraint, and repeats no other one."""
        able = (trial for trial in self.ranked(table) if not self.breaks(trial) and not self.repeats(trial))
        return next(able, None)

    def phase(self, trial: TrialEntry) -> str:
        """Its state; `refused` if a fact breaks a constraint, so that it is not trained."""
        return "refused" if trial.state == "proposed" and self.breaks(trial) else trial.state

    def repeats(self, trial: TrialEntry) -> bool:
        """Whether it trains the values of another trial with another seed, at the end of the search."""
        return self.repeated and "seed" in trial.changes

    def begun(self, table: SearchTable) -> list[TrialEntry]:
        """The trials that a budget counts: none that a fact refused, and no repetitions."""
        return [t for t in table.trials.values() if t.state != "proposed" and not self.repeats(t)]

    def ranked(self, table: SearchTable) -> list[TrialEntry]:
        """Trials with all values, the best first; those that break a constraint come last."""
        goals = range(len(self.objectives))
        alive = (t for t in table.trials.values() if t.state != "failed")
        valued = [t for t in alive if all(math.isfinite(self.score(t, goal)) for goal in goals)]
        return sorted(valued, key=lambda t: (self.breaks(t), -self.score(t), t.number))
