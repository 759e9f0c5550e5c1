"""Seats and views: which workers take part, which lanes each runs, and the position they continue from."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveInt

from shoal.spec.base import Spec

Role = Literal["worker", "server"]
MAX_SEAT = 10**9


class Seat(Spec):
    """A numbered slot for a worker or a server process. A number is never used again."""

    number: int = Field(ge=0, lt=MAX_SEAT)
    role: Role = "worker"

    @property
    def name(self) -> str:
        """The name of the process in this seat: worker-2, server-3."""
        return f"{self.role}-{self.number}"


class Address(Spec):
    """The address of a seat. Workers with the same `host_id` share memory and connect by the `unix` address."""

    model_config = ConfigDict(strict=True)

    host: str = Field(max_length=256)
    port: int = Field(ge=0, le=65535)
    host_id: str = Field(default="", max_length=256)
    unix: str = Field(default="", max_length=256)


class Attachment(Spec):
    """How a worker or server belongs to its run, as stated in its hello. `managed`: the run's engine started it and
    will report its exit. `can_save`: it can write checkpoints and the model, itself or through the driver.
    `needs_job`: it cannot open the run directory, needs the job in the welcome, and sends its events. Its machine is in
    its address."""

    model_config = ConfigDict(strict=True)

    managed: bool
    can_save: bool
    needs_job: bool


class View(Spec):
    """A numbered agreement between the driver and the workers of a run.

    A view with `carries` is a training view. It maps seats to lanes, and has the `addresses` of the members (and of
    other workers that still hold state), the `position` to continue from, and the `source`: the seat whose memory holds
    that position (None: every member holds it). One member, the `saver`, writes checkpoints for all. If the model is
    sharded, `places` are the ranks of the members, and the members find out together what they continue from.

    Other views request something. `halt`: the members stop, at the next step boundary or now, and report their
    position. `loads`: this seat loads the newest checkpoint. `followers`: these seats catch up from the memory of the
    source while it goes on training. `leave`: these seats exit. `stop`: all workers exit, for this reason.

    `pause_at`, in a training view: the members stop at the boundary after the first evaluation at or after this step.
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
    pause_at: NonNegativeInt | None = None

    def concerns(self, seat: int) -> bool:
        """Whether the process in this seat must act on the view."""
        called = seat == self.loads or seat in self.followers or seat in self.leave
        return bool(self.stop or self.halt) or seat in self.carries or called


def position_of(step: int, *, evaluated: bool) -> int:
    """The progress of a replica as one growing number: committed steps, and whether the evaluation after them is
    done."""
    return 2 * step + evaluated


def step_of(position: int) -> int:
    return position // 2


def is_evaluated(position: int | None) -> bool:
    """Whether the position is one after an evaluation."""
    return position is not None and position % 2 == 1
