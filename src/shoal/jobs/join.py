"""`shoal join`: workers on this machine for a run whose driver is on another."""

from __future__ import annotations

import contextlib
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_RUN, EXIT_TERMINATED, ShoalError, error, error_from_fields
from shoal.events import Event, EventReader
from shoal.fleet.agents.agent import Agent, LaunchCommand, StopCommand
from shoal.fleet.control_client import ControlClient
from shoal.fleet.driver_address import DriverAddress
from shoal.fleet.forkserver import ForkServer
from shoal.fleet.messages import AgentReport, ExitedReport, OutputReport
from shoal.fleet.process_main import TOKEN_VARIABLE, WELCOME_TIMEOUT_S
from shoal.jobs import commands
from shoal.jobs.fork_servers import WORKER_MODULE, make_fork_server
from shoal.jobs.run_executor import catch_stop_signals
from shoal.net.address import parse_address
from shoal.net.handshake import new_token
from shoal.spec.certificates import TlsContexts, load_tls_contexts
from shoal.spec.engine import parse_ports
from shoal.spec.job import MAX_WORKERS
from shoal.spec.run_paths import RunPaths
from shoal.spec.trust import CodeTrust
from shoal.spec.view import Seat

RETRY_S = 1.0
"""Between two attempts to reach a driver that is not there yet."""
AGENT_VARIABLE = "SHOAL_AGENT"
"""A secret that this agent shares with its workers, so that nobody else can report their exits and output."""
POLL_S = 0.1
MAX_UNSENT_REPORTS = 1000
NO_TRUST = CodeTrust()


def join(
    where: str,
    token: str,
    *,
    base_dir: Path,
    workers: int = 1,
    tls_dir: Path | None = None,
    trust: CodeTrust = NO_TRUST,
    show: Callable[[str], None],
    fork_server: ForkServer | None = None,
) -> int:
    """Run workers for the run at `where` (HOST:PORT) until it ends or the user stops it. Returns the exit code.

    `base_dir` has the job's code and data on this machine, `tls_dir` the certificates for a run that uses TLS. Workers
    refuse a job that names code outside of `trust`. `show` gets a line for everything that happens.
    """
    contact = _parse_address(where, token)
    if not 1 <= workers <= MAX_WORKERS:
        raise error("SH609", f"{workers} workers", where="--workers", fix=f"Ask for 1 to {MAX_WORKERS}.")
    contexts = load_tls_contexts(tls_dir, where="--tls") if tls_dir else None
    welcome = commands.fetch_welcome(contact, tls_contexts=contexts)
    with (
        tempfile.TemporaryDirectory(prefix="shoal-join-") as scratch,
        _fork_server(fork_server, welcome["threads"]) as mine,
    ):
        agent = new_token()
        # never on a command line, which other users can read
        environment = mine.environment | {TOKEN_VARIABLE: token, AGENT_VARIABLE: agent}
        options = ["--tls", str(tls_dir.resolve())] if tls_dir else []
        options += _port_options(welcome)
        with (
            contextlib.closing(_connect_agent(contact, agent, contexts)) as control,
            contextlib.closing(
                JoinedWorkers(RunPaths.at(scratch), mine, environment=environment, control=control, show=show)
            ) as joined,
        ):
            joined.start(workers, ["--join", where, "--dir", str(base_dir.resolve()), *options, *_trust_options(trust)])
            return joined.supervise()


def wait_for_driver(where: str, token: str, *, tls_dir: Path | None = None, wait_s: float) -> None:
    """Return when a driver answers at `where`. SH610 if none does in time, SH615 if the token is wrong. Checks nothing
    if there is no time to wait."""
    if not wait_s:
        return
    contact = _parse_address(where, token)
    contexts = load_tls_contexts(tls_dir, where="--tls") if tls_dir else None
    until_s = time.monotonic() + wait_s
    while True:
        try:
            commands.fetch_welcome(contact, tls_contexts=contexts)
            return
        except ShoalError as failure:
            if failure.code != "SH610" or time.monotonic() >= until_s:
                raise
        time.sleep(RETRY_S)


def _port_options(welcome: Mapping[str, Any]) -> list[str]:
    """The ports that the job allows its workers. SH610 if the driver sends something else."""
    ports = str(welcome.get("ports", ""))
    try:
        parse_ports(ports)
    except ValueError as failure:
        raise error("SH610", f"the driver's ports: {failure}") from failure
    return ["--ports", ports] if ports else []


def _trust_options(trust: CodeTrust) -> list[str]:
    return ["--trust-code"] if trust.everything else [f"--allow={','.join(trust.modules)}"]


def _parse_address(where: str, token: str) -> DriverAddress:
    try:
        host, port = parse_address(where)
    except ValueError as failure:
        raise error("SH609", str(failure), where=where, fix="Write HOST:PORT, as `shoal run` shows it.") from failure
    if not token:
        raise error("SH615", "there is no token", where=TOKEN_VARIABLE)
    return DriverAddress(host, port, token)


def _connect_agent(address: DriverAddress, agent: str, tls_contexts: TlsContexts | None) -> ControlClient:
    """The agent's own connection to the driver, for its reports."""
    hello = {"role": "agent", "host": socket.gethostname(), "agent": agent}
    control = ControlClient(lambda: address, lambda: hello, heartbeat=dict, tls_contexts=tls_contexts)
    try:
        control.connect(WELCOME_TIMEOUT_S)
    except BaseException:
        control.close()
        raise
    return control


@contextlib.contextmanager
def _fork_server(given: ForkServer | None, threads: int) -> Iterator[ForkServer]:
    if given is not None:
        yield given
    else:
        with make_fork_server(threads) as own:
            yield own


@dataclass
class JoinedWorker:
    """One worker on this machine. `name` is the driver's name for it. `reader` follows its own directory's events.
    `unsent` has the reports that wait until its seat is known; the newest, if it prints very much before."""

    reader: EventReader
    name: str = "worker"
    unsent: deque[AgentReport] = field(default_factory=lambda: deque(maxlen=MAX_UNSENT_REPORTS))
    errors: list[ShoalError] = field(default_factory=list)
    left: bool = False

    @property
    def seat(self) -> int | None:
        """The seat number that the driver assigned, once the worker has one."""
        number = self.name.removeprefix("worker-")
        return int(number) if number.isdecimal() else None


class JoinedWorkers:
    """All workers that one `shoal join` started; their start and end are shown."""

    def __init__(
        self,
        paths: RunPaths,
        fork_server: ForkServer,
        *,
        environment: Mapping[str, str],
        control: ControlClient,
        show: Callable[[str], None],
    ) -> None:
        self._paths = paths
        self._agent = Agent(paths, fork_server, environment=environment, report=self._on_report)
        self._control = control
        self._show = show
        self._workers: dict[int, JoinedWorker] = {}
        self._leaving = False
        self._exit_code = EXIT_OK

    def start(self, number: int, arguments: list[str]) -> None:
        for n in range(number):
            own = RunPaths(self._paths.root / f"worker-{n}")
            own.root.mkdir()
            self._workers[n] = JoinedWorker(EventReader(own.events))
            command = [*arguments, "--run", str(own.root)]
            self._agent.obey(LaunchCommand(seat=Seat(number=n), entry=WORKER_MODULE, arguments=command))

    def supervise(self) -> int:
        """Wait until all workers have exited. Returns the exit code. A stop request drains every worker."""
        with catch_stop_signals() as asked:
            while self._agent.running():
                self._agent.poll(POLL_S)
                self._read_events()
                if asked and not self._leaving:
                    self._show("leaving as soon as others have what is held here (once more: at once)")
                    self._leaving = True
                    self._agent.obey(StopCommand(seats=self._agent.running(), how="terminate"))
        if asked and self._exit_code == EXIT_OK:
            return EXIT_INTERRUPTED if asked[0] == "interrupted" else EXIT_TERMINATED
        return self._exit_code

    def close(self) -> None:
        """Kill the workers that still run."""
        self._agent.close()

    def _on_report(self, report: AgentReport) -> None:
        self._read_events()
        worker = self._workers[report.seat]
        worker.unsent.append(report)
        self._send_reports(worker)
        match report:
            case OutputReport(text=text):
                self._show(text)
            case ExitedReport():
                self._handle_exit(worker, report)

    def _send_reports(self, worker: JoinedWorker) -> None:
        """Tell the driver, which knows a worker by its seat."""
        while worker.seat is not None and worker.unsent:
            report = worker.unsent.popleft()
            self._control.send(report.kind, **report.model_dump(exclude={"kind"}) | {"seat": worker.seat})

    def _read_events(self) -> None:
        for worker in self._workers.values():
            for event in worker.reader.read_new():
                self._handle_event(worker, event)
            self._send_reports(worker)

    def _handle_event(self, worker: JoinedWorker, event: Event) -> None:
        worker.name = event.who
        if event.kind == "joined":
            self._show(f"{worker.name}: trains from step {event.step} on, lanes {', '.join(map(str, event['lanes']))}")
        elif event.kind == "left":
            worker.left = True
            self._show(f"{worker.name}: left at step {event.step} ({event['why']})")
        elif event.kind == "failed":
            worker.errors.append(_reported_error(event))

    def _handle_exit(self, worker: JoinedWorker, exited: ExitedReport) -> None:
        for failure in worker.errors:
            self._show(f"{worker.name}: {failure}")
        if self._leaving and exited.code == 0 and not worker.left:
            self._show(f"{worker.name}: gone before it had joined")
            return
        if exited.code != 0 and not worker.errors:
            self._show(f"{worker.name}: ended by {exited.reason}\n{exited.errors}".rstrip())
        if exited.code == 0 and not worker.left:
            self._show(f"{worker.name}: the run is finished")
        if exited.code != 0:
            self._exit_code = self._exit_code or (worker.errors[0].exit_code if worker.errors else EXIT_RUN)


def _reported_error(event: Event) -> ShoalError:
    if event["code"] == "BUG":
        return error("SH603", f"{event['message']}\n{event['where']}", fix="This is a bug in Shoal: please report it.")
    return error_from_fields(event.fields)
