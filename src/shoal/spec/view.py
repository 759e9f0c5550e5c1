"""Seats and views: who is in, who carries what, and from which step they go on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from shoal.spec.base import Spec


class Seat(Spec):
    """A numbered place that an engine fills with a worker or a server."""

    number: NonNegativeInt
    role: Literal["worker", "server"] = "worker"


class View(Spec):
    """The numbered agreement. `carries` maps a seat to its lanes; `source` is the seat whose state counts.

    `source` None means: from the newest valid checkpoint, or from the job's start where there is none.
    `stop` asks every member to leave at the next step boundary, after a save.
    """

    number: PositiveInt
    carries: dict[int, list[int]] = Field(default_factory=dict)
    step: NonNegativeInt = 0
    source: int | None = None
    stop: str = ""
