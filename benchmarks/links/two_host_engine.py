"""An engine over two hosts: the second worker runs on the far host, all other processes on the near host."""

from __future__ import annotations

import select
from collections.abc import Sequence

from shoal.fleet.engine import Exit, Launch, Node
from shoal.fleet.engines.local import LocalEngine
from shoal.fleet.forkserver import ForkServer
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Seat


class TwoHostEngine:
    """See Engine. `fork_servers` are those of the near and the far host, which share a file system."""

    def __init__(self, fork_servers: tuple[ForkServer, ForkServer], paths: RunPaths) -> None:
        self._near, self._far = (LocalEngine(fork_server, paths) for fork_server in fork_servers)
        self._workers = 0
        self._epoll = select.epoll()
        for fork_server in fork_servers:
            self._epoll.register(fork_server, select.EPOLLIN)

    def capacity(self) -> list[Node]:
        return self._near.capacity() + self._far.capacity()

    def start(self, launches: Sequence[Launch]) -> None:
        for launch in launches:
            self._workers += launch.seat.role == "worker"
            far = launch.seat.role == "worker" and self._workers == 2
            (self._far if far else self._near).start([launch])

    def poll(self, timeout_s: float) -> list[Exit]:
        self._epoll.poll(timeout_s)
        return self._near.poll(0) + self._far.poll(0)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def running(self) -> list[int]:
        return sorted(self._near.running() + self._far.running())

    def waiting(self) -> list[int]:
        return []

    def stop(self, seats: Sequence[int]) -> None:
        for engine in (self._near, self._far):
            engine.stop(seats)

    def reattach(self) -> list[Seat]:
        return self._near.reattach()

    def close(self) -> None:
        self._near.close()
        self._far.close()
        self._epoll.close()

    def pid(self, seat: int) -> int | None:
        return (self._near if seat in self._near.running() else self._far).pid(seat)
