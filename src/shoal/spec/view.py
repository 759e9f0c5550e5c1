"""Seats and views: who is in, who carries what, and from where they go on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from shoal.spec.base import Spec

Role = Literal["worker", "server"]


class Seat(Spec):
    """A numbered place that an engine fills with a worker or a server. A number is never used again."""

    number: NonNegativeInt
    role: Role = "worker"

    @property
    def name(self) -> str:
        """What everybody calls who sits there: worker-2, server-3."""
        return f"{self.role}-{self.number}"


class Address(Spec):
    """Where peers reach a seat. Workers with the same `host_id` share memory and meet at the `unix` address."""

    host: str
    port: int
    host_id: str = ""
    unix: str = ""


class Attachment(Spec):
    """What ties a worker or server to its run, as it says in its greeting. `managed`: the run's engine started it and
    will report its exit. `can_save`: it can write the run's directory. `needs_job`: it has no job file, and wants the
    job in the welcome. On which machine it is, its address says."""

    managed: bool
    can_save: bool
    needs_job: bool


class View(Spec):
    """The numbered agreement of a run.

    A view that `carries` is for training: seats to lanes, their `addresses` (and those of others who still know
    something), the `position` from which they go on and the `source` whose memory holds it (None: every member does).
    One member, the `saver`, writes for all. Where members hold a model together, `places` are their ranks in the grid,
    and they find out among themselves what they go on from.

    The other views ask for something: `halt` lets the members stop, at the next step boundary or now, and say where
    they stand; `loads` lets a seat take up the newest checkpoint; `followers` catch up from the memory of the source
    while it goes on training; seats in `leave` go; `stop` sends everybody home.
    """

    number: PositiveInt
    carries: dict[int, list[int]] = Field(default_factory=dict)
    addresses: dict[int, Address] = Field(default_factory=dict)
    position: NonNegativeInt = 0
    source: int | None = None
    saver: int | None = None
    places: dict[int, int] = Field(default_factory=dict)
    halt: Literal["", "boundary", "now"] = ""
    loads: int | None = None
    followers: list[int] = Field(default_factory=list)
    leave: list[int] = Field(default_factory=list)
    stop: str = ""

    def concerns(self, seat: int) -> bool:
        """Must this seat look at it?"""
        called = seat == self.loads or seat in self.followers or seat in self.leave
        return bool(self.stop or self.halt) or seat in self.carries or called


def position_of(step: int, *, evaluated: bool) -> int:
    """How far a replica is, as one number that grows: steps committed, and whether what follows them was evaluated."""
    return 2 * step + evaluated


def step_of(position: int) -> int:
    return position // 2
