"""The engine's end of one agent on one host: a process (ssh, or a local one) with pipes. Nothing here blocks."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shoal.errors import ShoalError, error, error_from_fields, fork_error
from shoal.fleet.agents.agent_pipe import (
    BANNER,
    END,
    MAX_NOISE_BYTES,
    PING_INTERVAL_S,
    PONG_TIMEOUT_S,
    AttachCommand,
    FailedReport,
    LeavingReport,
    PingCommand,
    PipeCommand,
    PipeReader,
    PipeReport,
    PongReport,
    ReadyReport,
    RunningReport,
    SetupCommand,
    encode_line,
    parse_report,
)
from shoal.fleet.engine import Node
from shoal.net.errors import ProtocolError
from shoal.spec.view import Seat

MAX_ERROR_BYTES = 8 << 10
MAX_ERROR_READS = 4
MAX_UNSENT_BYTES = 8 << 20
CLOSE_TIMEOUT_S = 10.0
KILL_TIMEOUT_S = 2.0
BANNER_TIMEOUT_S = 60.0
"""How long a host may say nothing after it was connected to. One that is asked for in a queue may take hours."""
READY_TIMEOUT_S = 300.0
"""How long an agent may take to import torch."""


@dataclass(frozen=True)
class AgentHost:
    """How to start the agent of a host. `explain(code, stderr)` is the error when it ended before it was ready.
    `queued`: the command may wait for the host for hours, and SIGTERM takes the request back. `detached`: the agent
    outlives this process for a while, unless it is told to end; with AttachCommand as `setup` it did."""

    node: Node
    command: tuple[str, ...]
    setup: SetupCommand | AttachCommand
    explain: Callable[[int, str], ShoalError]
    environment: Mapping[str, str] | None = None
    queued: bool = False
    detached: bool = False

    @property
    def name(self) -> str:
        return self.node.name


class HostLink:
    """One agent, from its start to its end. `state` goes from "starting" to "ready" and "lost", never back.

    `platform` is known when it is ready, `failure` if it was lost before. `reports` has what it said besides. `ended`:
    it was told to end, and is lost soon. `doubtful`: it has not done what it was told, and has not been heard since.
    `outlived`: the processes of an agent that outlived its driver, once it has told them.
    """

    def __init__(self, host: AgentHost, selector: selectors.BaseSelector) -> None:
        self.host = host
        self.state = "starting"
        self.leaving = self.ended = self.doubtful = False
        self.platform: dict[str, str] = {}
        self.failure: ShoalError | None = None
        self.reports: list[PipeReport] = []
        self.outlived: list[Seat] | None = None
        self._since_s = time.monotonic()  # the start, then the banner
        self._selector = selector
        self._banner_seen = isinstance(host.setup, AttachCommand)
        self._noise_bytes = 0
        self._unsent = encode_line(host.setup)
        self._errors = b""
        self._pinged_s = time.monotonic()
        self._unanswered_since_s: float | None = None
        try:
            self._process = subprocess.Popen(
                host.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=host.environment,
                start_new_session=True,  # Ctrl-C in the terminal reaches only the driver
            )
        except FileNotFoundError as failure:
            raise error("SH607", f"the program {host.command[0]} is missing", fix="Install it.") from failure
        except OSError as failure:
            raise fork_error(failure) from failure
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin, self._stderr = self._process.stdin.fileno(), self._process.stderr.fileno()
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._stderr, False)
        self._reader = PipeReader(self._process.stdout.fileno())
        self._open = {self._process.stdout.fileno(), self._stderr}
        for descriptor in self._open:
            selector.register(descriptor, selectors.EVENT_READ, self)

    @property
    def pid(self) -> int:
        """Of the process on this machine."""
        return self._process.pid

    @property
    def usable(self) -> bool:
        """Whether another process may be started there."""
        return self.state == "ready" and not (self.leaving or self.ended or self.doubtful)

    def send(self, command: PipeCommand) -> None:
        """Queue a command. Ignored if the agent is lost, or told to end."""
        if self.state == "lost" or self.ended:
            return
        self._unsent += encode_line(command)
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self._lose("it does not read")
        else:
            self.flush()

    def flush(self) -> None:
        """Send what the pipe takes, and a ping if it is time."""
        if self.state == "lost" or self.ended:
            return
        now = time.monotonic()
        if not self._unsent and now > self._pinged_s + PING_INTERVAL_S:
            self._pinged_s, self._unsent = now, encode_line(PingCommand())
            self._unanswered_since_s = self._unanswered_since_s or now
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._stdin, self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self.read()  # it is gone; what it said last may explain it

    def read(self) -> None:
        """Take in what has arrived."""
        if self.state == "lost":
            return
        self._read_errors()
        try:
            for line in self._reader.read_lines():
                self._take(line)
        except ProtocolError as failure:
            self._lose(str(failure))
            return
        if self._reader.closed:
            self._lose("it ended")
        elif self.state == "ready" and time.monotonic() > (self._unanswered_since_s or math.inf) + PONG_TIMEOUT_S:
            self._lose("it does not answer")
        elif self.state == "starting":
            self._check_start()

    def _check_start(self) -> None:
        """A host that accepts connections and then hangs would be waited for without an end."""
        limit_s = READY_TIMEOUT_S if self._banner_seen else BANNER_TIMEOUT_S
        if self.host.queued or time.monotonic() <= self._since_s + limit_s:
            return
        name, words = self.host.name, f" ({self.last_words})" if self.last_words else ""
        message = f"{name} accepted the connection and said nothing for {limit_s:g} s{words}"
        if self._banner_seen:
            message = f"the agent on {name} is not ready after {limit_s:g} s: it still imports the modules of the job"
        fix = "Look what hangs there: a login script, a file system, the interpreter."
        self.failure = error("SH651", message, where=f"host {name}", fix=fix)
        self._process.terminate()
        self._lose("it does not start")

    def _take(self, line: bytes) -> None:
        if not self._banner_seen:
            self._noise_bytes += len(line)
            self._banner_seen = line.strip() == BANNER
            if not self._banner_seen and (self._noise_bytes > MAX_NOISE_BYTES or b'"shoal-agent"' in line):
                raise ProtocolError("it does not speak this version's protocol")
            self._since_s = time.monotonic() if self._banner_seen else self._since_s
            return
        report = parse_report(line)
        self._unanswered_since_s, self.doubtful = None, False
        if isinstance(report, PongReport):
            return
        if isinstance(report, ReadyReport):
            self._set_ready(report.platform)
        elif isinstance(report, RunningReport):
            if not isinstance(self.host.setup, AttachCommand):
                raise ProtocolError("it was not asked what it runs")
            self.outlived = list(report.seats)
            if report.platform:
                self._set_ready(report.platform)
        elif isinstance(report, FailedReport):
            self.failure = error_from_fields(report.error).at(f"host {self.host.name}")
        elif isinstance(report, LeavingReport):
            self.leaving = True
        else:
            self.reports.append(report)

    def _set_ready(self, platform: Mapping[str, str]) -> None:
        """It may say so twice, and cannot change what it is."""
        if self.state == "ready" and self.platform != platform:
            raise ProtocolError("it is another machine now")
        self.state, self.platform = "ready", dict(platform)

    def _read_errors(self) -> None:
        with contextlib.suppress(OSError):
            for _ in range(MAX_ERROR_READS):
                if not (data := os.read(self._stderr, 1 << 16)):
                    self._forget(self._stderr)  # closed: it would be readable for ever
                    return
                self._errors = (self._errors + data)[-MAX_ERROR_BYTES:]

    def _lose(self, why: str) -> None:
        was_ready, self.state = self.state == "ready", "lost"
        self._withdraw()
        if not self.host.detached:  # else its closed input would look like the death of this process
            self._close_pipes()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_TIMEOUT_S)
        self._kill()
        self._close_pipes()
        if not was_ready and self.failure is None:
            text = self._errors.decode(errors="replace").strip()
            self.failure = self.host.explain(self._process.returncode, text or why)

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended the process on this machine."""
        return (self._process.returncode or 0) < 0

    @property
    def last_words(self) -> str:
        """The last line of standard error of the agent or of ssh."""
        lines = self._errors.decode(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else ""

    def end(self) -> None:
        """Close the agent's input: it kills its processes and ends. `wait` waits for that."""
        if self.host.detached and self._banner_seen:
            self._unsent += END + b"\n"
            self.flush()
        self.ended = True
        if not self._banner_seen and self._process.poll() is None:
            self._process.terminate()  # it does not read its input yet
        elif self.host.detached and self._unsent:
            self._withdraw()  # it does not read its input any more
        self._close_input()

    def _withdraw(self) -> None:
        if self.host.queued and self._process.poll() is None:
            self._process.terminate()

    def _close_input(self) -> None:
        if self._process.stdin and not self._process.stdin.closed:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def wait(self) -> None:
        """Wait until the agent has ended, and with it all its processes. One that cannot be reached any more ends its
        processes itself, when it has heard nothing for a minute."""
        if self.state == "lost":
            return
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while time.monotonic() < deadline and not self._reader.closed:
            self._read_errors()
            with contextlib.suppress(ProtocolError):
                self._reader.read_lines()
            time.sleep(0.005)
        self.state = "lost"
        self._close_pipes()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _forget(self, descriptor: int) -> None:
        if descriptor in self._open:
            self._open.discard(descriptor)
            self._selector.unregister(descriptor)

    def _close_pipes(self) -> None:
        for descriptor in list(self._open):
            self._forget(descriptor)
        self._close_input()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe:
                pipe.close()

    def _kill(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
