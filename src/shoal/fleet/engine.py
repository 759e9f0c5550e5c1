"""Engine: starts and watches seats. It knows processes and machines, and nothing of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.spec.view import Seat


@dataclass(frozen=True)
class Exit:
    """A seat that is empty now. `code` below 0 is the signal that ended it."""

    seat: int
    code: int

    @property
    def reason(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        import signal

        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"signal {-self.code}"


class Engine(Protocol):
    """Contract: `start` returns at once; a seat that was started appears exactly once in what `poll` returns,
    however it ended; `stop` ends seats now, without asking them; after `close` nothing that was started is left."""

    def start(self, seats: Sequence[Seat], entry: str, arguments: Sequence[str]) -> None: ...

    def poll(self, timeout_s: float) -> list[Exit]:
        """Seats that ended since the last call; waits up to the time given for the first."""

    def stop(self, seats: Sequence[int]) -> None: ...

    def close(self) -> None: ...
