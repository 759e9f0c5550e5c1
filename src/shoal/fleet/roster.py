"""The processes connected to a driver, for the worker group, the server group and `shoal.server`. No policy."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from shoal.fleet.messages import BeatMessage

RECONNECT_TIMEOUT_S = 5.0
"""Seconds that a process that outlived its driver has to connect to the new one."""
START_TIMEOUT_S = 300.0
"""Seconds that a process has to connect after the engine was told to start it."""


class Connections(Protocol):
    """The methods of `ControlServer` that a roster uses."""

    def silence_s(self, connection: int) -> float: ...

    def drop(self, connection: int) -> None: ...


_FIRST_HEARTBEAT = BeatMessage(kind="beat", phase="building")


@dataclass
class Peer:
    """A connected process: a worker, a server or a client. `managed`: the driver's engine reports its exit.
    `same_host`: the driver can read its state in /proc. `sends_events`: it cannot open the run directory. `nonce`
    tells it from other processes, also from those with its pid on another machine. `platform`: see `platform_facts`.

    It stays in the roster after its connection is lost (at `disconnected_at_s`), because it may reconnect.
    """

    connection: int
    pid: int = 0
    host: str = ""
    managed: bool = True
    same_host: bool = True
    sends_events: bool = False
    nonce: str = ""
    platform: Mapping[str, str] = field(default_factory=dict)
    last_heartbeat: BeatMessage = _FIRST_HEARTBEAT
    disconnected_at_s: float | None = None
    said_bye: bool = False


class Roster:
    """The seats of one role: which are connected, when each was last heard, which are expected to reconnect, and which
    were evicted and why.

    Belongs to the driver's thread. A connection belongs to one seat, and a seat has one connection at a time.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._peers: dict[int, Peer] = {}
        self._seat_by_connection: dict[int, int] = {}
        self._expected_until_s: dict[int, float] = {}
        self._starting_until_s: dict[int, float] = {}
        self._evicted: dict[int, str] = {}

    # ---- connections ----

    def connect(self, seat: int, peer: Peer) -> bool:
        """A process takes this seat, or reconnects; then its older connection is dropped. Returns whether it is new."""
        old = self._peers.get(seat)
        if old is not None and old.connection != peer.connection:
            self.disconnect(seat)
        self._peers[seat] = peer
        self._seat_by_connection[peer.connection] = seat
        self._expected_until_s.pop(seat, None)
        self._starting_until_s.pop(seat, None)
        return old is None

    def is_other_process(self, seat: int, pid: int, nonce: str = "") -> bool:
        """Whether another process than this one has connected with the seat: it lives, or its exit is not known yet."""
        peer = self._peers.get(seat)
        return peer is not None and (peer.pid, peer.nonce) != (pid, nonce)

    def disconnect(self, seat: int) -> None:
        """The connection was lost, or is closed by the driver. The process may still live and reconnect."""
        peer = self._peers.get(seat)
        if peer is not None and self._seat_by_connection.pop(peer.connection, None) is not None:
            peer.disconnected_at_s = time.monotonic()
            self._connections.drop(peer.connection)

    def remove(self, seat: int) -> None:
        """Remove a process that has ended. An eviction of the seat is remembered."""
        peer = self._peers.pop(seat, None)
        if peer is not None:
            self._seat_by_connection.pop(peer.connection, None)
        self._expected_until_s.pop(seat, None)
        self._starting_until_s.pop(seat, None)

    def seat_of(self, connection: int) -> int | None:
        return self._seat_by_connection.get(connection)

    def get(self, seat: int) -> Peer | None:
        return self._peers.get(seat)

    def __getitem__(self, seat: int) -> Peer:
        return self._peers[seat]

    def __contains__(self, seat: object) -> bool:
        return seat in self._peers

    def __iter__(self) -> Iterator[int]:
        """Seats of processes that have connected, ascending. May be called from any thread."""
        return iter(sorted(self._peers))

    def host(self, seat: int) -> str:
        """The host of the process; '' before it connects."""
        peer = self._peers.get(seat)
        return peer.host if peer else ""

    @property
    def connections(self) -> list[int]:
        """Open connections."""
        return list(self._seat_by_connection)

    def connections_of(self, seats: Iterable[int]) -> list[int]:
        """The last connections of these seats. The control server ignores messages to one that was just lost."""
        return [self._peers[seat].connection for seat in seats if seat in self._peers]

    def silence_s(self, seat: int) -> float:
        """Seconds since the process was last heard."""
        peer = self._peers[seat]
        if peer.disconnected_at_s is None:
            silence_s = self._connections.silence_s(peer.connection)
            if silence_s < math.inf:
                return silence_s
            peer.disconnected_at_s = time.monotonic()  # it was closed just now, and the message of it is to be received
        return time.monotonic() - peer.disconnected_at_s

    # ---- processes that are being started, or outlived an earlier driver ----

    def expect_start(self, seat: int, *, until_s: float) -> None:
        self._starting_until_s[seat] = until_s

    def take_late_starts(self, now_s: float) -> list[int]:
        """Remove and return the seats whose processes were started and have not connected in time."""
        return _take_overdue(self._starting_until_s, now_s)

    def expect_back(self, seat: int, *, until_s: float) -> None:
        self._expected_until_s[seat] = until_s

    def take_overdue(self, now_s: float) -> list[int]:
        """Remove and return the seats that did not reconnect in time."""
        return _take_overdue(self._expected_until_s, now_s)

    # ---- evictions ----

    def evict(self, seat: int, why: str) -> None:
        self._evicted[seat] = why

    def readmit(self, seat: int) -> str:
        """Undo the eviction. Returns its reason, or ''."""
        return self._evicted.pop(seat, "")

    def is_evicted(self, seat: object) -> bool:
        return seat in self._evicted

    @property
    def evicted(self) -> list[int]:
        return sorted(self._evicted)


class SeatNumbers:
    """Seat numbers, shared by workers and servers. A number is never reused, so an evicted process cannot return under
    its old name."""

    def __init__(self, first: int = 0) -> None:
        self._next = first

    def take(self) -> int:
        self._next += 1
        return self._next - 1

    def reserve(self, number: int) -> None:
        """Mark this number as used."""
        self._next = max(self._next, number + 1)


def _take_overdue(until_s: dict[int, float], now_s: float) -> list[int]:
    overdue = [seat for seat, limit_s in until_s.items() if now_s > limit_s]
    for seat in overdue:
        del until_s[seat]
    return overdue
