"""Workers as processes on this machine."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from shoal.fleet.engine import Exit
from shoal.spec.view import Seat


class LocalEngine:
    """Starts `python -m entry --seat N ...` with its output in a file. A worker has a session of its own, so that
    Ctrl-C in the terminal reaches the driver alone, which then asks the workers to leave."""

    def __init__(self, *, logs: Mapping[int, Path] | None = None, environment: Mapping[str, str] | None = None) -> None:
        self._logs = dict(logs or {})
        self._environment = dict(os.environ if environment is None else environment)
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def start(self, seats: Sequence[Seat], entry: str, arguments: Sequence[str]) -> None:
        for seat in seats:
            command = [sys.executable, "-m", entry, "--seat", str(seat.number), *arguments]
            with self._open_log(seat.number) as log:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    env=self._environment, start_new_session=True,
                )  # fmt: skip
            self._running[seat.number] = process
            self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, seat.number)

    def poll(self, timeout_s: float) -> list[Exit]:
        exits = []
        for key, _ in self._selector.select(timeout_s):
            process = self._running.pop(key.data)
            self._selector.unregister(key.fd)
            os.close(key.fd)
            exits.append(Exit(key.data, process.wait()))
        return exits

    def stop(self, seats: Sequence[int]) -> None:
        for seat in seats:
            if seat in self._running:
                self._running[seat].kill()

    def close(self) -> None:
        self.stop(list(self._running))
        while self._running:
            self.poll(1.0)
        self._selector.close()

    def pid(self, seat: int) -> int | None:
        process = self._running.get(seat)
        return process.pid if process else None

    def _open_log(self, seat: int):  # type: ignore[no-untyped-def]
        path = self._logs.get(seat, Path(os.devnull))
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("ab")
