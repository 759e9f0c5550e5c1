"""Workers as processes on this machine, forked from a nursery that has torch loaded."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from shoal.fleet.engine import Exit
from shoal.spec.view import Seat


class Nursery:
    """The driver's end. Made by whoever drives, shared by its engines, closed by its maker.

    `environment` counts from the start of the nursery's Python (threads, hash seed); `modules` are imported once.
    """

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # -P: files in the user's directory must not stand in for modules that torch imports.
            command = [sys.executable, "-P", "-m", "shoal.fleet.nursery", str(theirs.fileno()), *modules]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.environment = dict(environment)
        self._control = ours
        self._selector = selectors.DefaultSelector()
        self._selector.register(ours, selectors.EVENT_READ)
        self._rest = b""
        self._pids: dict[str, int | None] = {}
        self._exits: dict[str, int] = {}

    def start(
        self, key: str, entry: str, arguments: Sequence[str], *, logs: Path, environment: Mapping[str, str]
    ) -> None:
        self._pids[key] = None
        self._order(
            {
                "start": key,
                "entry": entry,
                "arguments": list(arguments),
                "output": f"{logs}.log",
                "errors": f"{logs}.err",
                "environment": dict(environment),
                "directory": os.getcwd(),
            }
        )

    def kill(self, key: str) -> None:
        if key in self._pids:
            self._order({"kill": key})

    def _order(self, order: dict[str, object]) -> None:
        try:
            self._control.sendall(json.dumps(order).encode() + b"\n")
        except BrokenPipeError:
            self._lost()

    def listen(self, timeout_s: float) -> None:
        """Take in what the nursery said; waits up to the time given if nothing is known yet."""
        while self._selector.select(0 if self._exits else timeout_s):
            data = received(self._control)
            if not data:
                self._selector.unregister(self._control)
                self._lost()
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            for row in map(json.loads, lines):
                if "born" in row:
                    self._pids[row["born"]] = row["pid"]
                else:
                    self._pids.pop(row["gone"], None)
                    self._exits[row["gone"]] = row["code"]
            timeout_s = 0

    def _lost(self) -> None:
        """The nursery died: what it had started is nobody's any more, and leaves by itself."""
        code = self._process.wait()
        self._exits |= dict.fromkeys(self._pids, code or -9)
        self._pids.clear()

    def gone(self, keys: Sequence[str]) -> dict[str, int]:
        """Exit codes of those that ended since the last call."""
        return {key: self._exits.pop(key) for key in keys if key in self._exits}

    def pid(self, key: str) -> int | None:
        """Once it is born."""
        while self._pids.get(key, 0) is None:
            self.listen(1.0)
        return self._pids.get(key)

    def close(self) -> None:
        """Nothing that was started is left."""
        for key in list(self._pids):
            self.kill(key)
        while self._pids:
            self.listen(1.0)
        self._control.close()
        self._process.wait()
        self._selector.close()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def received(control: socket.socket) -> bytes:
    """What the other end said; nothing if it is gone, also when it left something unread."""
    try:
        return control.recv(65536)
    except ConnectionResetError:
        return b""


class LocalEngine:
    """The seats of one run. A worker has a session of its own, so that Ctrl-C in the terminal reaches the driver
    alone, which then asks the workers to leave."""

    def __init__(
        self, nursery: Nursery, *, name: str, logs: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._nursery = nursery
        self._name = name
        self._logs = logs
        self._environment = nursery.environment if environment is None else dict(environment)
        self._seats: dict[str, int] = {}

    def start(self, seats: Sequence[Seat], entry: str, arguments: Sequence[str]) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)
        for seat in seats:
            key = f"{self._name}#{seat.number}"
            self._seats[key] = seat.number
            self._nursery.start(
                key,
                entry,
                ["--seat", str(seat.number), *arguments],
                logs=self._logs / f"worker-{seat.number}",
                environment=self._environment,
            )

    def poll(self, timeout_s: float) -> list[Exit]:
        self._nursery.listen(timeout_s)
        return [Exit(self._seats.pop(key), code) for key, code in self._nursery.gone(list(self._seats)).items()]

    def stop(self, seats: Sequence[int]) -> None:
        for key, number in self._seats.items():
            if number in seats:
                self._nursery.kill(key)

    def close(self) -> None:
        self.stop(list(self._seats.values()))
        while self._seats:
            self.poll(1.0)

    def pid(self, seat: int) -> int | None:
        """The process in a seat."""
        return self._nursery.pid(f"{self._name}#{seat}")
