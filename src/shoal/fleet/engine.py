"""Engine: starts workers and servers on machines, and reports their exits. It knows nothing of training."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shoal.errors import ShoalError
from shoal.spec.view import Seat

UNSEEN_END = "an unknown cause"
"""The reason of an exit that could not be observed."""


@dataclass(frozen=True)
class Node:
    """A machine on which an engine can start processes. `shares_run_dir`: its processes can open the run directory. If
    not, they send everything to the driver. `seats`: how many processes it is for; None means as its cores allow."""

    name: str
    cores: int
    memory_bytes: int
    gpus: int
    shares_run_dir: bool
    seats: int | None = None

    def room(self, threads: int) -> int:
        """How many processes with this many threads the machine is for."""
        return self.cores // threads if self.seats is None else self.seats


@dataclass(frozen=True)
class Launch:
    """One process to start: `entry` is a module whose main() is called with `--seat N` and the arguments in sys.argv.
    `node` is a name from `capacity`; None lets the engine choose. `environment` is added to the process's own: secrets
    go there, because other users can read arguments. `reach` is the driver's HOST:PORT, which it needs."""

    seat: Seat
    entry: str
    arguments: tuple[str, ...] = ()
    node: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    reach: str = ""


@dataclass(frozen=True)
class Exit:
    """The process of a seat has ended. A negative `code` is the signal that ended it; None means that the exit could
    not be observed. `reason` completes the sentence "it ended by …". `start_error`: why it could not be started."""

    seat: int
    code: int | None
    reason: str
    start_error: ShoalError | None = None

    @classmethod
    def with_code(cls, seat: int, code: int | None, *, start_error: ShoalError | None = None) -> Exit:
        return cls(seat, code, _reason(code), start_error)


def _reason(code: int | None) -> str:
    if code is None:
        return UNSEEN_END
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


class Engine(Protocol):
    """The processes of one run. Every implementation passes tests/fleet/engine_contract.py.

    An engine belongs to one thread; other engines of the same process may run in other threads. `poll` reports every
    launched seat exactly once, however its process ended, and also if it could not be started at all. The output of a
    process goes to the logs of the run directory, named after its seat.
    """

    def capacity(self) -> list[Node]:
        """The machines that can be used now."""

    def start(self, launches: Sequence[Launch]) -> None:
        """Start these processes. Returns at once; an engine may start them while `poll` is called. Raises ValueError,
        before anything is started, for a seat that already runs or a node that is not in `capacity`."""

    def poll(self, timeout_s: float) -> list[Exit]:
        """The exits since the last call. If there are none, waits up to `timeout_s`, or less, and may return []."""

    def fileno(self) -> int:
        """For select(): readable when `poll` may have exits. Engines may share the descriptor, and another engine may
        have read it first, so call `poll` periodically as well."""

    def running(self) -> list[int]:
        """Seats that were launched or reattached and are not yet reported by `poll`, in ascending order."""

    def waiting(self) -> list[int]:
        """Of `running`, the seats that have no machine yet, in ascending order. On a busy cluster they wait for hours;
        `stop` withdraws them."""

    def stop(self, seats: Sequence[int]) -> None:
        """Kill these processes now. `poll` reports their exits. Seats that do not run are ignored."""

    def reattach(self) -> list[Seat]:
        """Take over the processes of this run that an earlier driver left behind, and return their seats in ascending
        order. They are then watched and stopped like launched ones. Call it before the first `start`. An engine whose
        processes end with their driver returns []."""

    def close(self) -> None:
        """Stop all processes. Returns when none is left, on any machine."""
