"""The agent: forks, watches and signals processes on one machine, for a driver that may be on another.

It carries out commands and sends reports. Both are plain validated data that can cross the control channel as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Literal

from pydantic import Field

from shoal.events import LineTail
from shoal.fleet.engine import Exit, Launch
from shoal.fleet.engines.local import LocalEngine
from shoal.fleet.forkserver import ForkServer
from shoal.fleet.messages import MAX_ERROR_CHARACTERS, MAX_LINE_CHARACTERS, AgentReport, ExitedReport, OutputReport
from shoal.spec.base import Spec
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Seat

Word = Annotated[str, Field(pattern=r"^[^\x00]*$")]
"""What a process can get as an argument."""
Variables = dict[Annotated[str, Field(pattern=r"^[^\x00=]+$")], Word]


class LaunchCommand(Spec):
    """Start a process; see `Launch`."""

    kind: Literal["launch"] = "launch"
    seat: Seat
    entry: Word
    arguments: list[Word] = Field(default_factory=list)
    environment: Variables = Field(default_factory=dict, repr=False)
    reach: str = ""


class StopCommand(Spec):
    """`terminate` sends SIGTERM, which asks a worker to leave; `kill` ends the processes at once."""

    kind: Literal["stop"] = "stop"
    seats: list[int]
    how: Literal["terminate", "kill"]


AgentCommand = LaunchCommand | StopCommand


class Agent:
    """Belongs to one thread. `poll` calls `report` with every line that a process printed, in order, and then once with
    its exit. The directory `paths` is the agent's own; output goes to its logs. The processes are tied to the agent:
    none outlives it, even if it is killed."""

    def __init__(
        self,
        paths: RunPaths,
        fork_server: ForkServer,
        *,
        environment: Mapping[str, str],
        report: Callable[[AgentReport], None],
    ) -> None:
        self._engine = LocalEngine(fork_server, paths, environment=environment, tied=True)
        self._paths = paths
        self._report = report
        self._seats: dict[int, Seat] = {}
        self._output: dict[int, LineTail] = {}

    def obey(self, command: AgentCommand) -> None:
        match command:
            case LaunchCommand(seat=seat, entry=entry, arguments=arguments, environment=added):
                self._engine.start([Launch(seat, entry, tuple(arguments), environment=added)])
                self._seats[seat.number] = seat
                self._output[seat.number] = LineTail(self._paths.log(seat.number, seat.role))
            case StopCommand(seats=seats, how="terminate"):
                self._engine.terminate([seat for seat in seats if seat in self._seats])
            case StopCommand(seats=seats):
                self._engine.stop(seats)

    def running(self) -> list[int]:
        return self._engine.running()

    def seats(self) -> list[Seat]:
        """Of the processes that have no exit report yet."""
        return [self._seats[number] for number in sorted(self._seats)]

    def poll(self, timeout_s: float) -> None:
        """Send new reports. Waits up to `timeout_s` for an exit."""
        exits = self._engine.poll(timeout_s)
        for seat in self._output:
            self._report_output(seat)
        for one in exits:
            self._report_exit(one)

    def close(self) -> None:
        """Kill the processes that still run."""
        self._engine.close()

    def _report_output(self, seat: int) -> None:
        for line in self._output[seat].read_new():
            self._report(OutputReport(seat=seat, text=line[:MAX_LINE_CHARACTERS]))

    def _report_exit(self, one: Exit) -> None:
        seat = self._seats.pop(one.seat)
        del self._output[one.seat]
        log = self._paths.error_log(one.seat, seat.role)
        errors = log.read_text(encoding="utf-8", errors="replace")[-MAX_ERROR_CHARACTERS:] if log.is_file() else ""
        failed = (
            {name: value[-MAX_ERROR_CHARACTERS:] for name, value in one.start_error.to_fields().items()}
            if one.start_error
            else None
        )
        self._report(ExitedReport(seat=one.seat, code=one.code, reason=one.reason, errors=errors, start_error=failed))
