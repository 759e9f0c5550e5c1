"""LocalEngine: workers and servers as processes on this machine, forked by a fork server that has torch loaded."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.fleet.engine import Exit, Launch, Node
from shoal.fleet.forkserver import ForkServer
from shoal.fleet.orphans import find_orphans
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Seat


class LocalEngine:
    """See Engine. Each process has its own session, so that Ctrl-C in the terminal reaches only the driver.

    Several engines may share a fork server; their seats are distinguished by `paths`. `environment` replaces the fork
    server's environment. `tied`: the processes end with the fork server, even if it is killed.
    """

    def __init__(
        self,
        fork_server: ForkServer,
        paths: RunPaths,
        *,
        environment: Mapping[str, str] | None = None,
        tied: bool = False,
    ) -> None:
        self._fork_server = fork_server
        self._paths = paths
        self._tied = tied
        self._environment = fork_server.environment if environment is None else dict(environment)
        self._seats: dict[str, int] = {}
        self._reattached: dict[int, Path] = {}  # seats and their locks

    def capacity(self) -> list[Node]:
        return [this_machine()]

    def start(self, launches: Sequence[Launch]) -> None:
        self._check(launches)
        self._paths.logs.mkdir(parents=True, exist_ok=True)
        for launch in launches:
            number = launch.seat.number
            self._seats[self._key(number)] = number
            self._fork_server.start(
                self._key(number),
                launch.entry,
                ["--seat", str(number), *launch.arguments],
                logs=self._paths.logs / launch.seat.name,
                environment={**self._environment, **launch.environment},
                tied=self._tied,
            )

    def poll(self, timeout_s: float) -> list[Exit]:
        self._fork_server.poll(timeout_s)
        codes = self._fork_server.pop_exit_codes(list(self._seats))
        return [self._exit(key, self._seats.pop(key), code) for key, code in codes.items()]

    def _exit(self, key: str, seat: int, code: int | None) -> Exit:
        """The exit code of a reattached process is unknown, but its lock is not: it removes the lock when it leaves,
        and a process that is killed or fails does not."""
        lock = self._reattached.pop(seat, None)
        left = code is None and lock is not None and not lock.exists()
        return Exit.with_code(seat, 0 if left else code, start_error=self._fork_server.pop_start_error(key))

    def fileno(self) -> int:
        return self._fork_server.fileno()

    def running(self) -> list[int]:
        return sorted(self._seats.values())

    def waiting(self) -> list[int]:
        return []

    def stop(self, seats: Sequence[int]) -> None:
        for key, number in self._seats.items():
            if number in seats:
                self._fork_server.kill(key)

    def reattach(self) -> list[Seat]:
        """Finds processes by the locks of their seats, which they hold as long as they live."""
        found = find_orphans(self._paths)
        for orphan in found:
            number = orphan.seat.number
            self._seats[self._key(number)] = number
            self._reattached[number] = self._paths.seat_lock(number, orphan.seat.role)
            self._fork_server.adopt(self._key(number), orphan.pid)
        return [orphan.seat for orphan in found]

    def close(self) -> None:
        self.stop(self.running())
        while self._seats:
            self.poll(1.0)
        find_orphans(self._paths)  # removes the locks of killed processes

    def pid(self, seat: int) -> int | None:
        """The pid of a seat's process, after waiting until it is forked; None if it has ended."""
        return self._fork_server.pid(self._key(seat))

    def terminate(self, seats: Sequence[int]) -> None:
        """Send SIGTERM, which asks a worker to leave."""
        for seat in seats:
            pid = self.pid(seat)
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    def _key(self, seat: int) -> str:
        return f"{self._paths.root}#{seat}"

    def _check(self, launches: Sequence[Launch]) -> None:
        for launch in launches:
            if launch.seat.number in self._seats.values():
                raise ValueError(f"{launch.seat.name} runs already")
            if launch.node not in (None, socket.gethostname()):
                raise ValueError(f"there is no node {launch.node!r}")


def this_machine() -> Node:
    """The resources of this machine that this process may use. GPUs are counted by NVIDIA's device files, because torch
    is not loaded."""
    return Node(
        name=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=sum(re.fullmatch(r"nvidia\d+", name) is not None for name in os.listdir("/dev")),
        shares_run_dir=True,
    )
