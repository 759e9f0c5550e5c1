"""The seam of policies: one verb that decides, one that says where a new trial first stops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shoal.plan.search.ledger import Ledger, TrialState
from shoal.plan.search.space import Point


@dataclass(frozen=True)
class Begin:
    """A new trial. `point` None: the sampler chooses it. `group`: bracket or member.

    `copy_of`: it begins as a copy of another trial's state, (trial, unit).
    """

    group: int = 0
    point: Point | None = None
    copy_of: tuple[int, int] | None = None
    why: str = ""


@dataclass(frozen=True)
class Continue:
    """A paused trial is trained up to unit `end`."""

    trial: int
    end: int
    why: str = ""


@dataclass(frozen=True)
class Nothing:
    """The slot stays free until another stretch ends. If none is under way, the search ends; `why` says so."""

    why: str


Choice = Begin | Continue | Nothing


class Policy(Protocol):
    """A pure function of the ledger. `may_begin` is False when the budget allows no new trial."""

    def decide(self, ledger: Ledger, *, may_begin: bool) -> Choice: ...

    def first_end(self, ledger: Ledger, trial: TrialState) -> int:
        """The unit at which a new trial first stops."""


class Full:
    """Every trial is trained to its end."""

    def decide(self, ledger: Ledger, *, may_begin: bool) -> Choice:
        return Begin() if may_begin else Nothing("the number of trials is reached")

    def first_end(self, ledger: Ledger, trial: TrialState) -> int:
        return trial.shape.units
