"""The workers of a run as the membership policy sees them, and what it decides about them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from shoal.spec.view import Address, View

FIRST_PAUSE_S = 10.0
LONGEST_PAUSE_S = 600.0

HaltUrgency = Literal["", "boundary", "now"]


@dataclass
class Member:
    """A seat as the driver knows it; see `Attachment` for `managed` and `can_save`.

    `position` is what it reported when it last stopped; None: it holds no state. `checkpointed`: a checkpoint has that
    position. `last_view_sent` is the number of the last view sent to it. `catch_up_attempted`: it has caught up, or
    failed to, while the others trained. While it is `busy` loading or saving, the others wait. `fruitless_views` counts
    the views in a row that made no step, probably because of it. `may_hold_state`: it had a view from which it could
    get a state.
    """

    seat: int
    managed: bool
    can_save: bool
    address: Address
    training: bool = False
    stopped: bool = False
    position: int | None = None
    checkpointed: bool = False
    lane_s: float | None = None
    leaving: str = ""
    ready_since_s: float = 0.0
    last_view_sent: int = 0
    halt_sent: HaltUrgency = ""
    catch_up_attempted: bool = False
    busy: bool = False
    fruitless_views: int = 0
    may_hold_state: bool = False


@dataclass(frozen=True)
class PublishView:
    """Send a view to these seats."""

    view: View
    seats: list[int]
    why: str = ""


@dataclass(frozen=True)
class StartWorkers:
    """The engine must start this many more workers."""

    count: int


@dataclass(frozen=True)
class EvictWorker:
    """The worker must leave the run, for this reason."""

    seat: int
    why: str


MembershipAction = PublishView | StartWorkers | EvictWorker


@dataclass
class LeftOutWorkers:
    """Workers that views leave out for a while: all live, but no step was made with them.

    The usual cause is a network in which two machines reach the driver and not each other. The others go on. After a
    pause the worker is on trial: it returns if it can catch up from one that trains, which disturbs nobody.
    """

    _until_s: dict[int, float] = field(default_factory=dict)
    _pause_s: dict[int, float] = field(default_factory=dict)
    _trials: dict[int, int | None] = field(default_factory=dict)
    """By seat: the position from which the worker must advance."""

    def __contains__(self, seat: object) -> bool:
        return seat in self._until_s

    @property
    def seats(self) -> list[int]:
        return sorted(self._until_s)

    def add(self, seat: int, now_s: float, *, position: int | None) -> None:
        """Each time for twice as long."""
        pause_s = self._pause_s.get(seat, FIRST_PAUSE_S)
        self._until_s[seat] = now_s + pause_s
        self._pause_s[seat] = min(2 * pause_s, LONGEST_PAUSE_S)
        self._trials[seat] = position

    def end_pauses(self, now_s: float, *, all_of_them: bool = False) -> list[int]:
        """The seats that are on trial from now on."""
        over = [seat for seat, until_s in self._until_s.items() if all_of_them or now_s >= until_s]
        for seat in over:
            del self._until_s[seat]
        return over

    def failed_trial(self, seat: int, position: int | None) -> bool:
        """Whether a worker on trial, which has tried to catch up, is where it was."""
        return seat in self._trials and seat not in self and (position or 0) <= (self._trials[seat] or 0)

    def readmit(self, seat: int) -> None:
        """It trains with the others. If no step is made again, its pause is longer."""
        self._trials.pop(seat, None)

    def forget(self, seat: int) -> None:
        for kept in (self._until_s, self._pause_s, self._trials):
            kept.pop(seat, None)


def worker_names(seats: Iterable[int]) -> str:
    return ", ".join(f"worker-{seat}" for seat in seats)
