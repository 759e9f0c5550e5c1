"""Who is connected to a driver: facts that the worker group, the server group and `shoal.server` share. No policy."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

RECONNECT_TIMEOUT_S = 5.0
"""How long a process that outlived its driver has to connect to the new one."""


class Connections(Protocol):
    """What a roster needs of a `ControlServer`."""

    def silence_s(self, connection: int) -> float: ...

    def drop(self, connection: int) -> None: ...


def _initial_heartbeat() -> Mapping[str, Any]:
    return {"phase": "building", "since_s": 0.0}


@dataclass
class Peer:
    """A process that has connected: a worker, a server or a client. `managed`: the driver's engine reports its
    exit. `same_host`: the driver can read its state in /proc.

    It stays in the roster while its connection is lost (since `disconnected_at_s`): it ends, or connects again.
    """

    connection: int
    pid: int = 0
    host: str = ""
    managed: bool = True
    same_host: bool = True
    last_heartbeat: Mapping[str, Any] = field(default_factory=_initial_heartbeat)
    disconnected_at_s: float | None = None
    said_bye: bool = False


class Roster:
    """The seats of one role: who is connected, when it was last heard, who is expected back, who was evicted and why.

    Belongs to the thread that drives. A connection belongs to one seat, and a seat has one connection at a time.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._peers: dict[int, Peer] = {}
        self._seat_by_connection: dict[int, int] = {}
        self._expected_until_s: dict[int, float] = {}
        self._evicted: dict[int, str] = {}

    # ---- connections ----

    def connect(self, seat: int, peer: Peer) -> bool:
        """A process takes this seat, or connects again: its older connection is dropped. Is it new here?"""
        old = self._peers.get(seat)
        if old is not None and old.connection != peer.connection:
            self.disconnect(seat)
        self._peers[seat] = peer
        self._seat_by_connection[peer.connection] = seat
        self._expected_until_s.pop(seat, None)
        return old is None

    def disconnect(self, seat: int) -> None:
        """Its connection is lost, or is closed from here. The process may live on and connect again."""
        peer = self._peers.get(seat)
        if peer is not None and self._seat_by_connection.pop(peer.connection, None) is not None:
            peer.disconnected_at_s = time.monotonic()
            self._connections.drop(peer.connection)

    def remove(self, seat: int) -> None:
        """Its process is gone. That the seat was evicted stays known."""
        peer = self._peers.pop(seat, None)
        if peer is not None:
            self._seat_by_connection.pop(peer.connection, None)
        self._expected_until_s.pop(seat, None)

    def seat_of(self, connection: int) -> int | None:
        return self._seat_by_connection.get(connection)

    def get(self, seat: int) -> Peer | None:
        return self._peers.get(seat)

    def __getitem__(self, seat: int) -> Peer:
        return self._peers[seat]

    def __contains__(self, seat: object) -> bool:
        return seat in self._peers

    def __iter__(self) -> Iterator[int]:
        """Seats of processes that have connected, in their order. Any thread may ask."""
        return iter(sorted(self._peers))

    def host(self, seat: int) -> str:
        """'' while it has not connected."""
        peer = self._peers.get(seat)
        return peer.host if peer else ""

    @property
    def connections(self) -> list[int]:
        """Those that are open."""
        return list(self._seat_by_connection)

    def connections_of(self, seats: Iterable[int]) -> list[int]:
        """For messages: one that was just lost is dropped by the control server anyway."""
        return [self._peers[seat].connection for seat in seats if seat in self._peers]

    def silence_s(self, seat: int) -> float:
        """Seconds since it was last heard."""
        peer = self._peers[seat]
        if peer.disconnected_at_s is not None:
            return time.monotonic() - peer.disconnected_at_s
        return self._connections.silence_s(peer.connection)

    # ---- processes that outlived an earlier driver ----

    def expect_back(self, seat: int, *, until_s: float) -> None:
        self._expected_until_s[seat] = until_s

    def take_overdue(self, now_s: float) -> list[int]:
        """Seats that did not connect in time. They are expected no longer."""
        overdue = [seat for seat, until_s in self._expected_until_s.items() if now_s > until_s]
        for seat in overdue:
            del self._expected_until_s[seat]
        return overdue

    # ---- evictions ----

    def evict(self, seat: int, why: str) -> None:
        self._evicted[seat] = why

    def readmit(self, seat: int) -> str:
        """It is no longer evicted. Why it was, or ''."""
        return self._evicted.pop(seat, "")

    def is_evicted(self, seat: object) -> bool:
        return seat in self._evicted

    @property
    def evicted(self) -> list[int]:
        return sorted(self._evicted)


class SeatNumbers:
    """Numbers of seats, of workers and servers together. A number is never given twice, so that an evicted process
    cannot come back under its old name."""

    def __init__(self, first: int = 0) -> None:
        self._next = first

    def take(self) -> int:
        self._next += 1
        return self._next - 1

    def reserve(self, number: int) -> None:
        """Somebody has this one."""
        self._next = max(self._next, number + 1)
