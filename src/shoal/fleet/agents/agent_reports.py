"""The driver's side of agents on other machines: output and exits of their processes."""

from __future__ import annotations

import time
from collections.abc import Callable

from shoal.events import EventWriter
from shoal.fleet.control_server import ControlMessage, ControlServer
from shoal.fleet.messages import (
    MAX_LINE_CHARACTERS,
    AgentHello,
    ExitedReport,
    OutputReport,
    parse_agent_message,
    printable,
)
from shoal.fleet.rate_limit import RateLimit
from shoal.net.errors import ProtocolError
from shoal.spec.run_paths import RunPaths

MAX_AGENTS = 1024
OUTPUT_BYTES_S, OUTPUT_BURST_BYTES = 256 << 10, 4 << 20
"""What an agent may add to the logs in the long run and at once. The rest is dropped, and a note says so once."""


class AgentReports:
    """Belongs to the driver's thread. Output goes to the logs of the run directory, like that of the engine's own
    processes. An exit by a signal becomes a note in the event stream; a worker that fails reports its error itself.

    `agent_of` returns the secret of the agent that started the worker of a seat: '' if no agent did, None for a seat
    that no worker has taken yet. An agent may report its own workers only.
    """

    def __init__(
        self, control: ControlServer, paths: RunPaths, stream: EventWriter, *, agent_of: Callable[[int], str | None]
    ) -> None:
        self._control = control
        self._paths = paths
        self._stream = stream
        self._agent_of = agent_of
        self._agents: dict[int, AgentHello] = {}  # by connection
        self._limits: dict[int, RateLimit] = {}
        self._exited: set[int] = set()

    def admit(self, connection: int, hello: AgentHello) -> None:
        """Welcome an agent. One that reconnects loses its older connection: lines that come late would stand in the
        logs after newer ones."""
        for older in [one for one, known in self._agents.items() if hello.agent and known.agent == hello.agent]:
            self._control.drop(older)
            self._forget(older)
        if len(self._agents) >= MAX_AGENTS:
            raise ProtocolError(f"there are {MAX_AGENTS} agents already")
        self._agents[connection] = hello
        self._limits[connection] = RateLimit(OUTPUT_BYTES_S, OUTPUT_BURST_BYTES)
        self._control.send(connection, "welcome", run=self._paths.name)

    def owns_connection(self, connection: int) -> bool:
        return connection in self._agents

    def handle(self, message: ControlMessage) -> None:
        """Handle an agent's message. A malformed message closes the connection; the agent may reconnect."""
        if message.kind == "lost":
            self._forget(message.connection)
            return
        agent = self._agents[message.connection]
        try:
            match parse_agent_message(message.kind, message.fields):
                case OutputReport() as report if self._owns(agent, report.seat):
                    self._log(message.connection, agent, report)
                case ExitedReport() as report if self._owns(agent, report.seat):
                    self._note_exit(agent, report)
        except ProtocolError as failure:
            self._control.refuse(message.connection, str(failure), name=f"the agent on {agent.host}")
            self._forget(message.connection)

    def _owns(self, agent: AgentHello, seat: int) -> bool:
        """Whether this agent started the worker. False for a worker that has not connected to this driver yet.
        ProtocolError if somebody else started it."""
        owner = self._agent_of(seat)
        if owner is not None and (not owner or owner != agent.agent):
            raise ProtocolError(f"it reports worker-{seat}, which it did not start")
        return owner is not None

    def _note_exit(self, agent: AgentHello, report: ExitedReport) -> None:
        if (report.code is None or report.code < 0) and report.seat not in self._exited:
            self._exited.add(report.seat)
            reason = printable(report.reason)
            self._stream.emit("note", message=f"worker-{report.seat} ({printable(agent.host)}) ended by {reason}")

    def _log(self, connection: int, agent: AgentHello, report: OutputReport) -> None:
        line = printable(report.text.expandtabs(), limit=MAX_LINE_CHARACTERS) + "\n"
        limit = self._limits[connection]
        if not limit.allows(len(line), time.monotonic()):
            if limit.dropped == 1:
                message = f"the workers on {printable(agent.host)} print too much: not all of it is in the logs"
                self._stream.emit("note", message=message)
            return
        self._paths.logs.mkdir(exist_ok=True)
        with self._paths.log(report.seat).open("a", encoding="utf-8") as file:
            file.write(line)

    def _forget(self, connection: int) -> None:
        self._agents.pop(connection, None)
        self._limits.pop(connection, None)
