"""Engine: gets workers and servers onto machines, and reports how they end. It knows nothing of training."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.spec.view import Seat

UNSEEN_END = "an unknown cause"
"""The reason of an exit that nobody could observe."""


@dataclass(frozen=True)
class Node:
    """A machine on which an engine can start processes. `shares_run_dir`: processes there can write the run's
    directory, and so may save checkpoints."""

    name: str
    cores: int
    memory_bytes: int
    gpus: int
    shares_run_dir: bool


@dataclass(frozen=True)
class Launch:
    """One process to start: `entry` is a module whose main() is called with `--seat N` and the arguments in sys.argv.
    `node` is a name from `capacity`; None lets the engine choose."""

    seat: Seat
    entry: str
    arguments: tuple[str, ...] = ()
    node: str | None = None


@dataclass(frozen=True)
class Exit:
    """The process of a seat has ended. `code` below 0 is the signal that ended it, None an end that nobody could
    observe. `reason` completes the sentence "it ended by …"."""

    seat: int
    code: int | None
    reason: str

    @classmethod
    def with_code(cls, seat: int, code: int | None) -> Exit:
        return cls(seat, code, _reason(code))


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
    """The processes of one run. Every body passes tests/fleet/engine_contract.py.

    An engine belongs to one thread; other engines of the same process may run in other threads.
    Every launched seat is reported by `poll` exactly once, however its process ended, and also when it could not be
    started at all. What a process prints ends up in the logs of the run's directory, named after its seat.
    """

    def capacity(self) -> list[Node]:
        """The machines that can be used now."""

    def start(self, launches: Sequence[Launch]) -> None:
        """Returns at once. ValueError, before anything is started, for a seat that runs already and for a node that
        `capacity` does not name."""

    def poll(self, timeout_s: float) -> list[Exit]:
        """The exits since the last call. Waits up to `timeout_s` if there is none. Other news of a process ends the
        wait too, so that it may return nothing early."""

    def fileno(self) -> int:
        """For select(): readable when `poll` may have something. Engines may share what is behind it, and another one
        may have read the news first: call `poll` now and then in any case."""

    def running(self) -> list[int]:
        """Seats that were launched or reattached and are not yet reported by `poll`, in ascending order."""

    def stop(self, seats: Sequence[int]) -> None:
        """Ends these processes now, without asking them. `poll` reports them. Seats that do not run are ignored."""

    def reattach(self) -> list[Seat]:
        """Takes over the processes of this run that an earlier driver left behind, and returns their seats in
        ascending order. They are then watched and stopped like launched ones. Call it before the first `start`."""

    def close(self) -> None:
        """Stops everything that runs. Returns when nothing is left, on any machine."""
