"""The agent of a host: `python -m shoal.fleet.agents.host_agent`, started by an engine over ssh or as a child.

It gets commands on standard input and sends reports on standard output. It imports torch once, in its fork server, and
forks each process from there. When its input ends, for whatever reason, or it hears nothing for a while, it kills
everything that it started and removes its directory. Processes get a directory of their own there, and nothing else of
the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from shoal.errors import ShoalError, error
from shoal.fleet.agents.agent import Agent, LaunchCommand, StopCommand
from shoal.fleet.agents.agent_pipe import (
    BANNER,
    MAX_SILENCE_S,
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
    parse_command,
)
from shoal.fleet.agents.notice import watch_notice
from shoal.fleet.forkserver import ForkServer
from shoal.fleet.messages import AgentReport, ExitedReport
from shoal.net.address import parse_address
from shoal.net.errors import ProtocolError
from shoal.net.host_id import MACHINE_VARIABLE
from shoal.spec.run_paths import RunPaths

POLL_S = 0.1
IDLE_POLL_S = 1.0
REACH_TIMEOUT_S = 5.0
SCRATCH_PREFIX = "shoal-agent-"
CERTIFICATES_VARIABLE = "SHOAL_CERTIFICATES"
"""The directory with this machine's files for TLS, set by who starts the agent."""


def main() -> None:
    commands, reports = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what a module prints while it is imported is no report
    code = 0
    try:
        with contextlib.suppress(BrokenPipeError), scratch_directory() as scratch:
            os.write(reports, BANNER + b"\n")
            HostAgent(commands, reports, scratch).run()
    except ProtocolError as failure:
        print(f"the agent ends: {failure}", file=sys.stderr, flush=True)
        code = 1
    sys.stdout.flush()
    os._exit(code)


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """A new directory, removed at the end. Directories that killed agents left behind are removed first."""
    remove_stale_directories()
    path = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX))
    with (path / ".new").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (path / ".new").rename(path / ".lock")  # only now can others see a lock that nobody holds
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


def remove_stale_directories() -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{SCRATCH_PREFIX}*/.lock"):
        with contextlib.suppress(OSError), lock.open() as file:
            if os.fstat(file.fileno()).st_uid == os.getuid():
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)


class HostAgent:
    """Serves one engine. `run` returns when the engine is gone and no process is left."""

    def __init__(self, commands: int, reports: int, scratch: Path) -> None:
        self._input = PipeReader(commands)
        self._commands = commands
        self._reports = reports
        self._scratch = scratch
        self._fork_server: ForkServer | None = None
        self._agent: Agent | None = None
        self._is_ready = self._must_leave = self._is_leaving = False
        self._reached = False
        self._heard_s = time.monotonic()
        self._patience_s = MAX_SILENCE_S
        self._names: dict[int, str] = {}
        self._wake = -1
        self._ended = threading.Event()

    def run(self) -> None:
        signals, wake = os.pipe()
        os.set_blocking(signals, False)
        os.set_blocking(wake, False)
        self._wake = wake
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            while self._advance():
                descriptors = [self._commands, signals, *([self._fork_server.fileno()] if self._fork_server else [])]
                select.select(descriptors, [], [], POLL_S if self._names else IDLE_POLL_S)
                with contextlib.suppress(BlockingIOError):
                    os.read(signals, 4096)
        finally:
            self._ended.set()
            if self._agent is not None:
                self._agent.close()
            if self._fork_server is not None:
                self._fork_server.close()

    def _advance(self) -> bool:
        """Carry out commands and send reports. Returns False when it is time to end."""
        for line in self._input.read_lines():
            self._heard_s = time.monotonic()
            self._obey(parse_command(line))
        if self._must_leave:
            self._leave()
        if self._agent is not None:
            self._agent.poll(0)
        is_heard = time.monotonic() < self._heard_s + self._patience_s
        return self._tell_when_ready() and not self._input.closed and is_heard

    def _obey(self, command: PipeCommand) -> None:
        match command:
            case SetupCommand() if self._agent is None:
                self._set_up(command)
            case LaunchCommand() if self._agent is not None:
                self._launch(self._agent, command)
            case StopCommand() if self._agent is not None:
                self._agent.obey(command)
            case AttachCommand() if self._agent is not None:
                platform = self._fork_server.platform if self._fork_server else {}
                self._send(RunningReport(seats=self._agent.seats(), platform=platform))
                if self._is_leaving:
                    self._send(LeavingReport())
            case PingCommand():
                self._send(PongReport())
            case SetupCommand() | AttachCommand() | LaunchCommand() | StopCommand():
                raise ProtocolError("the first command, and no other, sets the agent up")

    def _launch(self, agent: Agent, command: LaunchCommand) -> None:
        """Start the process in a directory of its own, unless it could not reach its driver."""
        if command.reach and not self._reached and (why := unreachable_reason(command.reach)):
            fix = "Set network.listen, and network.advertise if needed, to an address that this host can reach."
            message = f"{socket.gethostname()} cannot reach the driver at {command.reach}: {why}"
            failed = _fields(error("SH610", message, fix=fix))
            self._send(ExitedReport(seat=command.seat.number, code=1, reason="exit code 1", start_error=failed))
            return
        self._reached = True
        if command.seat.number in self._names:
            raise ProtocolError(f"{command.seat.name} runs already")
        own = self._scratch / command.seat.name
        own.mkdir()
        self._names[command.seat.number] = command.seat.name
        arguments = with_own_certificates(command.arguments)
        agent.obey(command.model_copy(update={"arguments": [*arguments, "--run", str(own)]}))
        if self._is_leaving:  # it was sent before the engine knew
            agent.obey(StopCommand(seats=[command.seat.number], how="terminate"))

    def _set_up(self, setup: SetupCommand) -> None:
        self._patience_s = setup.patience_s
        own: dict[str, str] = {}
        if setup.machine:
            own = {MACHINE_VARIABLE: setup.machine, "XDG_CACHE_HOME": str(self._scratch / "cache")}
        environment = os.environ | setup.environment | own
        os.chdir(self._scratch)
        self._fork_server = ForkServer(environment, setup.modules)
        self._agent = Agent(RunPaths(self._scratch), self._fork_server, environment=environment, report=self._on_report)

        if setup.notice:
            watch_notice(setup.notice, self._on_notice, stopped=self._ended)

    def _on_notice(self) -> None:
        self._must_leave = True
        with contextlib.suppress(OSError):
            os.write(self._wake, b"\0")

    def _tell_when_ready(self) -> bool:
        """Returns False if the agent cannot start processes."""
        if self._is_ready or self._fork_server is None:
            return True
        if failure := self._fork_server.startup_failure():
            self._send(FailedReport(error=_fields(failure)))
            return False
        if self._fork_server.platform:
            self._is_ready = True
            self._send(ReadyReport(platform=self._fork_server.platform))
        return True

    def _on_sigterm(self, *_: object) -> None:
        self._must_leave = True

    def _leave(self) -> None:
        """The host is being taken away. Every process is asked to leave once others hold its state."""
        self._must_leave = False
        if self._agent is not None:
            self._agent.obey(StopCommand(seats=self._agent.running(), how="terminate"))
        if not self._is_leaving:
            self._is_leaving = True
            self._send(LeavingReport())

    def _on_report(self, report: AgentReport) -> None:
        self._send(report)
        if isinstance(report, ExitedReport):
            shutil.rmtree(self._scratch / self._names.pop(report.seat), ignore_errors=True)

    def _send(self, report: PipeReport) -> None:
        line = encode_line(report)
        while line:
            line = line[os.write(self._reports, line) :]


def with_own_certificates(arguments: Sequence[str]) -> list[str]:
    """The files for TLS may lie elsewhere on this machine than on the driver's."""
    own = os.environ.get(CERTIFICATES_VARIABLE)
    found = list(arguments)
    if own and "--tls" in found:
        found[found.index("--tls") + 1] = own
    return found


def unreachable_reason(address: str) -> str:
    """Why nothing answers at HOST:PORT; '' if something does."""
    try:
        with socket.create_connection(parse_address(address), timeout=REACH_TIMEOUT_S):
            return ""
    except (OSError, ValueError) as failure:
        return str(failure)


def _fields(failure: ShoalError) -> dict[str, str]:
    return {name: value[:2000] for name, value in failure.to_fields().items()}


if __name__ == "__main__":
    main()
