"""The driver's side of the fork server, a process that has torch loaded and forks workers in milliseconds."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from shoal.errors import ShoalError, error, error_from_fields, fork_error

MAX_HELD = 8
"""Things that one fork server is asked to hold."""


class ForkServer:
    """Shared by the engines of one process, also by engines in other threads. Its creator closes it.

    `environment` is set before its Python starts (threads, hash seed); `modules` are imported once. Workers outlive a
    fork server that is killed, unless they are tied to it; the next `start` then starts a new one. `adopt` watches a
    process that an earlier driver started; the exit code of such a process is unknown (None).

    `platform` is what decides about bits (see `platform_facts`), once it has imported the modules; before, it is empty.
    """

    def __init__(
        self, environment: Mapping[str, str], modules: Sequence[str], *, python: str = "", at_once: bool = True
    ) -> None:
        """`python` is the interpreter to use instead of this process's. `at_once`: begin to import now, and not with
        the first `start`."""
        self.environment = dict(environment)
        self.modules = list(modules)
        self.platform: dict[str, str] = {}
        self._python = python or sys.executable
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._pids: dict[str, int | None] = {}
        self._exit_codes: dict[str, int | None] = {}
        self._start_errors: dict[str, ShoalError] = {}
        self._watched: dict[int, str] = {}  # pidfds of processes that are not children of the fork server
        self._lock = threading.RLock()
        self._held: list[tuple[str, str]] = []
        self._imports = 0  # that it was asked for, and has not finished
        if at_once:
            self._spawn()

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # -P: files in the user's directory must not shadow modules that torch imports.
            command = [self._python, "-P", "-m", "shoal.fleet.forkserver_main", str(theirs.fileno()), *self.modules]
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    env=self.environment,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as failure:
                ours.close()
                raise fork_error(failure) from failure
        self._control = ours
        self._imports = 1
        self._selector.register(ours, selectors.EVENT_READ)
        self._partial = b""
        for entry, argument in self._held:
            self._send_command({"hold": entry, "argument": argument})

    def start(
        self,
        key: str,
        entry: str,
        arguments: Sequence[str],
        *,
        logs: Path,
        environment: Mapping[str, str],
        tied: bool = False,
    ) -> None:
        order: dict[str, object] = {
            "start": key,
            "entry": entry,
            "arguments": list(arguments),
            "output": f"{logs}.log",
            "errors": f"{logs}.err",
            "environment": dict(environment),
            "directory": os.getcwd(),
            "tied": tied,
        }
        with self._lock:
            if self._control is None:
                self._spawn()
            self._pids[key] = None
            self._send_command(order)

    def hold(self, entry: str, argument: str) -> None:
        """Let the fork server call `hold(argument)` of a module, once: processes that it forks later find the result.
        A new fork server after a death does it again."""
        with self._lock:
            if (entry, argument) not in self._held and len(self._held) < MAX_HELD:
                self._held.append((entry, argument))
                if self._control is not None:
                    self._send_command({"hold": entry, "argument": argument})

    def preload(self, modules: Sequence[str]) -> None:
        """Import further modules, for the processes that are started after this call."""
        with self._lock:
            self.modules += modules
            if self._control is not None and modules:
                self._imports += 1
                self._send_command({"import": list(modules)})

    def adopt(self, key: str, pid: int) -> None:
        """Watch a process that an earlier driver left behind."""
        with self._lock:
            self._pids[key] = pid
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._record_exit(key, None)
                return
            self._watched[descriptor] = key
            self._selector.register(descriptor, selectors.EVENT_READ)

    def kill(self, key: str) -> None:
        with self._lock:
            adopted = next((descriptor for descriptor, k in self._watched.items() if k == key), None)
            if adopted is not None:
                signal.pidfd_send_signal(adopted, signal.SIGKILL)
            elif key in self._pids:
                self._send_command({"kill": key})

    def _send_command(self, command: dict[str, object]) -> None:
        assert self._control is not None
        try:
            self._control.sendall(json.dumps(command).encode() + b"\n")
        except BrokenPipeError:
            self._handle_own_death()

    def fileno(self) -> int:
        """For select(): readable when `poll` has something to take in."""
        return self._selector.fileno()

    def poll(self, timeout_s: float) -> None:
        """Read messages of the fork server; waits up to `timeout_s` if no exit is known yet."""
        while ready := self._selector.select(0 if self._exit_codes else timeout_s):
            with self._lock:
                for key, _ in ready:
                    if key.fileobj is self._control:
                        self._read_messages()
                    elif key.fd in self._watched:
                        self._record_exit(self._unwatch(key.fd), None)
            timeout_s = 0

    def _read_messages(self) -> None:
        assert self._control is not None
        try:
            data = receive_or_empty(self._control, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return  # another thread has read it
        if not data:
            self._handle_own_death()
            return
        *lines, self._partial = (self._partial + data).split(b"\n")
        for row in map(json.loads, lines):
            if "ready" in row:
                self._imports -= 1
                self.platform = row["platform"]
            elif "born" in row:
                self._pids[row["born"]] = row["pid"]
            else:
                if "error" in row:
                    self._start_errors[row["gone"]] = error_from_fields(row["error"])
                self._record_exit(row["gone"], row["code"])

    def _record_exit(self, key: str, code: int | None) -> None:
        self._pids.pop(key, None)
        self._exit_codes[key] = code

    def _unwatch(self, descriptor: int) -> str:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        return self._watched.pop(descriptor)

    def _handle_own_death(self) -> None:
        """The fork server died. The workers that it forked live on, and this process watches them from now on."""
        if self._control is None:
            return
        assert self._process is not None
        self._selector.unregister(self._control)
        self._control.close()
        self._control = None
        code = self._process.wait()
        for key, pid in list(self._pids.items()):
            if pid is None:
                if self._imports and code > 0:
                    self._start_errors[key] = self._startup_error(code)
                self._record_exit(key, code or None)
            elif key not in self._watched.values():
                self.adopt(key, pid)

    def _startup_error(self, code: int) -> ShoalError:
        message = f"{self._python} ended with exit code {code} before it had loaded Shoal"
        return error("SH629", message, fix=f"Try: {self._python} -c 'import shoal, torch'.")

    def startup_failure(self) -> ShoalError | None:
        """Why the fork server ended before it was ready; None if it is ready, or still starts."""
        if self._control is not None or self._process is None or not self._imports:
            return None
        return self._startup_error(self._process.returncode)

    def pop_start_error(self, key: str) -> ShoalError | None:
        """Why the process of an exit could not be started; None if it was."""
        return self._start_errors.pop(key, None)

    def pop_exit_codes(self, keys: Sequence[str]) -> dict[str, int | None]:
        """Exit codes of the processes among `keys` that ended since the last call."""
        return {key: self._exit_codes.pop(key) for key in keys if key in self._exit_codes}

    def pid(self, key: str) -> int | None:
        """The pid of the process, after waiting until it is forked; None if it has ended."""
        while self._pids.get(key, 0) is None:
            self.poll(1.0)
        return self._pids.get(key)

    def close(self) -> None:
        """Kill every process that was started, and wait until all are gone."""
        for key in list(self._pids):
            self.kill(key)
        while self._pids:
            self.poll(1.0)
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            if self._imports:
                self._process.kill()  # it may import for seconds
            self._process.wait()
        self._selector.close()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def receive_or_empty(control: socket.socket, flags: int = 0) -> bytes:
    """Data from the other end; b"" if it is closed, even with unread data."""
    try:
        return control.recv(65536, flags)
    except ConnectionResetError:
        return b""
