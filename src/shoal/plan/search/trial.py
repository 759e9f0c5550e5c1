"""The nouns of a search: a trial, a stretch of its training, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Changes = Mapping[str, Any]
"""Job changes of a trial: the paths that `--set` knows, with plain JSON values."""


@dataclass(frozen=True)
class TrialShape:
    """What the check of a trial's job tells. A pure function of the job, never of a measurement.

    Progress is counted in units: evaluations on the validation data or, in a job with folds, whole folds. `cost` is
    the virtual time of the whole training. `facts` (`parameters`, `flops`) may be objectives and constraints: they are
    known before anything is trained. `failure` says why the job cannot be trained.
    """

    units: int
    cost: float
    facts: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True)
class Stretch:
    """Decision `number`: slot `slot` trains `trial` from unit `start` to unit `end`, in virtual time from `begins` to
    `ends`.

    `copy_of` (population only): the trial starts as a copy of another trial's state, (trial, unit), instead of anew.
    """

    number: int
    slot: int
    trial: int
    changes: Changes
    start: int
    end: int
    begins: float
    ends: float
    copy_of: tuple[int, int] | None = None
    why: str = ""


@dataclass(frozen=True)
class StretchResult:
    """One row of metric values per trained unit, as the search names its metrics.

    Fewer rows than the stretch has units, without a failure: the trial's own early stopping ended it, and it is
    complete. `failure`: it failed after these rows (NaN, out of memory), and is not trained again.
    """

    rows: tuple[Mapping[str, float], ...] = ()
    failure: str = ""


@dataclass(frozen=True)
class ShapeWanted:
    """A new trial was proposed; its shape must be told before anything else is decided. `memory`: see `Point`."""

    trial: int
    changes: Changes
    memory: tuple[float, ...] = ()


@dataclass(frozen=True)
class Wait:
    """The next decision needs the result of this stretch. All other workers may help it."""

    number: int


@dataclass(frozen=True)
class SearchEnd:
    """Nothing is left to decide. `best` is the winner's trial, or None if no trial succeeded; `why` says what ended the
    search (its budget, a grid that is exhausted)."""

    best: int | None
    why: str


class SearchPlan(Protocol):
    """A search as a pure state machine: the same calls in virtual order give the same decisions, in any process.

    `decide` is called until it returns `Wait` or `SearchEnd`; then again after `tell`. Results may be told in any real
    order: a result counts only when its virtual end comes. Whatever `decide` returned and whatever was told is written
    to the journal, and a search is resumed by making the same calls again.
    """

    def decide(self) -> Stretch | ShapeWanted | Wait | SearchEnd: ...

    def tell_shape(self, trial: int, shape: TrialShape) -> None: ...

    def tell(self, number: int, result: StretchResult) -> None: ...
