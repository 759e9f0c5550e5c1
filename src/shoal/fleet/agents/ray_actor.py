"""What runs on a node of Ray: an actor that starts an agent and passes lines to it and from it, in order."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any

READ_TIMEOUT_S = 5.0
PARENT_POLL_S = 0.5
_READ_BYTES = 1 << 16
MAX_ERROR_BYTES = 8 << 10
REPLACED = -1


class AgentActor:
    """The agent ends with the actor: its input ends then. Each method is called by one thread at a time.

    One bridge at a time is served, the one that attached last. What another says is ignored.
    """

    def __init__(self, python: str, module: str) -> None:
        command = [python or sys.executable, "-P", "-m", module]
        pipe = subprocess.PIPE
        # the directory in which Ray starts actors may be deleted while they live
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, cwd="/")
        self._bridge = 0
        self._number, self._given, self._rest = 0, b"", b""
        threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()

    def attach(self) -> int:
        """The number of a new bridge."""
        self._bridge += 1
        return self._bridge

    def write(self, bridge: int, data: bytes) -> None:
        """Whole lines to the agent. Nothing more follows after b''."""
        assert self._process.stdin is not None
        if bridge != self._bridge:
            return
        with contextlib.suppress(OSError):
            if data:
                self._process.stdin.write(data)
                self._process.stdin.flush()
            else:
                self._process.stdin.close()

    def read(self, bridge: int, received: int) -> tuple[int, bytes | None]:
        """Whole lines that the agent said after the piece `received`, and their number. A new bridge gets the last one
        again: the bridge before it may have died with it. b'' if the agent is silent for a while, None when it has
        ended. The number is REPLACED if another bridge is served now."""
        if bridge != self._bridge:
            return REPLACED, None
        if received < self._number:
            return self._number, self._given
        data = self._read_lines()
        if data:
            self._number, self._given = self._number + 1, data
        return self._number, data

    def _read_lines(self) -> bytes | None:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], READ_TIMEOUT_S)
        if not readable:
            return b""
        data = os.read(self._process.stdout.fileno(), _READ_BYTES)
        if not data:
            return None
        lines, end, self._rest = (self._rest + data).rpartition(b"\n")
        return lines + end

    def terminate(self) -> None:
        """The node is being taken away."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def end(self) -> tuple[int, bytes]:
        """The exit code of an agent that has ended, and its last words."""
        assert self._process.stderr is not None
        return self._process.wait(), self._process.stderr.read()[-MAX_ERROR_BYTES:]


def end_with_parent(parent: int) -> None:
    """An actor may outlive the raylet that started it. Nobody can reach it then."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(1)


def actor_class(ray: Any) -> Any:
    """AgentActor for Ray: input, output and signals do not wait for each other."""
    groups = {"attach": "signals", "write": "input", "read": "output", "terminate": "signals", "end": "output"}
    for name, group in groups.items():
        setattr(AgentActor, name, ray.method(concurrency_group=group)(getattr(AgentActor, name)))
    return ray.remote(concurrency_groups={"input": 1, "output": 1, "signals": 1}, max_restarts=0)(AgentActor)
