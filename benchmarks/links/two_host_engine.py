"""An engine over two hosts: the second worker runs on the far host, all other processes on the near host."""

from __future__ import annotations

import select
from collections.abc import Sequence
from pathlib import Path

from shoal.fleet.engine import Exit
from shoal.fleet.engines.local import ForkServer, LocalEngine
from shoal.spec.view import Seat


class TwoHostEngine:
    """`fork_servers`: those of the near and the far host."""

    def __init__(self, fork_servers: tuple[ForkServer, ForkServer], *, name: str, logs: Path) -> None:
        self._near, self._far = (LocalEngine(fork_server, name=name, logs=logs) for fork_server in fork_servers)
        self._workers = 0
        self._epoll = select.epoll()
        for fork_server in fork_servers:
            self._epoll.register(fork_server, select.EPOLLIN)

    def start(self, seats: Sequence[Seat], entry: str, arguments: Sequence[str]) -> None:
        for seat in seats:
            self._workers += seat.role == "worker"
            far = seat.role == "worker" and self._workers == 2
            (self._far if far else self._near).start([seat], entry, arguments)

    def adopt(self, seat: int, pid: int) -> None:
        raise NotImplementedError("there are no earlier processes to adopt")

    def fileno(self) -> int:
        return self._epoll.fileno()

    @property
    def seats(self) -> list[int]:
        return sorted(self._near.seats + self._far.seats)

    def poll(self, timeout_s: float) -> list[Exit]:
        self._epoll.poll(timeout_s)
        return self._near.poll(0) + self._far.poll(0)

    def stop(self, seats: Sequence[int]) -> None:
        for engine in (self._near, self._far):
            engine.stop([seat for seat in seats if seat in engine.seats])

    def close(self) -> None:
        self._near.close()
        self._far.close()
        self._epoll.close()

    def pid(self, seat: int) -> int | None:
        return (self._near if seat in self._near.seats else self._far).pid(seat)
