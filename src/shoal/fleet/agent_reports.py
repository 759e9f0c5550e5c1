"""The driver's side of agents on other machines: output and exits of their processes."""

from __future__ import annotations

from shoal.events import EventWriter
from shoal.fleet.agent import ExitedReport, OutputReport, parse_report
from shoal.fleet.control_server import ControlMessage, ControlServer
from shoal.spec.run_paths import RunPaths


class AgentReports:
    """Belongs to the driver's thread. Output goes to the logs of the run directory, like that of the engine's own
    processes. An exit by a signal becomes a note in the event stream; a worker that fails reports its error itself."""

    def __init__(self, control: ControlServer, paths: RunPaths, stream: EventWriter) -> None:
        self._control = control
        self._paths = paths
        self._stream = stream
        self._hosts: dict[int, str] = {}  # host name by connection

    def admit(self, hello: ControlMessage) -> None:
        self._hosts[hello.connection] = str(hello.fields.get("host", ""))
        self._control.send(hello.connection, "welcome", run=self._paths.name)

    def owns_connection(self, connection: int) -> bool:
        return connection in self._hosts

    def handle(self, message: ControlMessage) -> None:
        """Handle an agent's message. A malformed message closes the connection; the agent may reconnect."""
        if message.kind == "beat":
            return
        host = self._hosts[message.connection]
        if message.kind == "lost":
            del self._hosts[message.connection]
            return
        try:
            report = parse_report(message.kind, message.fields)
        except ValueError:
            self._control.drop(message.connection)
            del self._hosts[message.connection]
            return
        match report:
            case OutputReport():
                self._log(report)
            case ExitedReport() if report.code is None or report.code < 0:
                self._stream.emit("note", message=f"worker-{report.seat} ({host}) ended by {report.reason}")

    def _log(self, report: OutputReport) -> None:
        self._paths.logs.mkdir(exist_ok=True)
        with self._paths.log(report.seat).open("a", encoding="utf-8") as file:
            file.write(report.text + "\n")
