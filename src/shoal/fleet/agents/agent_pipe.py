"""What an engine and the agent on a host say to each other over a pipe: one JSON object per line, checked before use.

The agent's first line is the banner. What a login shell prints before it is skipped.
"""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from shoal.fleet.agents.agent import LaunchCommand, StopCommand, Variables, Word
from shoal.fleet.messages import ErrorFields, ExitedReport, Message, Name, OutputReport
from shoal.net.errors import ProtocolError
from shoal.spec.base import Spec
from shoal.spec.view import Seat

BANNER = b'{"kind":"shoal-agent","protocol":1}'
END = b'{"kind":"end"}'
"""For what keeps an agent that outlives its driver: the agent shall end. A pipe that closes without it is a death."""
PING_INTERVAL_S = 5.0
MAX_SILENCE_S = 60.0
"""An agent that hears nothing for so long kills its processes: nobody can reach it any more."""
PONG_TIMEOUT_S = 20.0
"""An agent that does not answer a ping for so long counts as lost: what connects it may not say that it is gone."""
MAX_LINE_BYTES = 1 << 20
MAX_SEATS = 1 << 12
MAX_NOISE_BYTES = 1 << 16
_READ_BYTES = 1 << 16
_MAX_READS = 4


class SetupCommand(Spec):
    """The first command. `environment` is set before torch is imported, `modules` are imported once for all processes.
    `machine`: the agent pretends to be on a machine of this name, with a cache of its own. `notice`: a file or URL that
    says that the machine will be taken away. `patience_s`: how long the agent waits for another engine."""

    kind: Literal["setup"] = "setup"
    environment: Variables
    modules: list[Word]
    machine: Word = ""
    notice: Word = ""
    patience_s: float = MAX_SILENCE_S


class AttachCommand(Spec):
    """The first command of another engine to an agent that outlived its driver. The answer is a RunningReport."""

    kind: Literal["attach"] = "attach"


class PingCommand(Spec):
    kind: Literal["ping"] = "ping"


class PongReport(Message):
    """The answer to a ping."""

    kind: Literal["pong"] = "pong"


class ReadyReport(Message):
    """The agent can start processes. `platform` see `platform_facts`."""

    kind: Literal["ready"] = "ready"
    platform: Annotated[dict[Name, Name], Field(max_length=16)]


class RunningReport(Message):
    """The processes that the agent runs. `platform` is empty if it is not ready yet."""

    kind: Literal["running"] = "running"
    seats: Annotated[list[Seat], Field(max_length=MAX_SEATS)]
    platform: Annotated[dict[Name, Name], Field(max_length=16)]


class FailedReport(Message):
    """The agent cannot start processes, and ends. `error` has the fields of an error."""

    kind: Literal["failed"] = "failed"
    error: ErrorFields


class LeavingReport(Message):
    """The host is being taken away: its processes were asked to leave, and no more can be started."""

    kind: Literal["leaving"] = "leaving"


PipeCommand = SetupCommand | AttachCommand | LaunchCommand | StopCommand | PingCommand
PipeReport = ReadyReport | RunningReport | PongReport | FailedReport | LeavingReport | OutputReport | ExitedReport

_COMMAND: TypeAdapter[PipeCommand] = TypeAdapter(Annotated[PipeCommand, Field(discriminator="kind")])
_REPORT: TypeAdapter[PipeReport] = TypeAdapter(Annotated[PipeReport, Field(discriminator="kind")])


def parse_command(line: bytes) -> PipeCommand:
    """ProtocolError if it is malformed; likewise below."""
    try:
        return _COMMAND.validate_json(line)
    except ValidationError as failure:
        raise ProtocolError(f"a command is malformed: {failure.error_count()} errors") from failure


def parse_report(line: bytes) -> PipeReport:
    try:
        return _REPORT.validate_json(line)
    except ValidationError as failure:
        raise ProtocolError(f"a report is malformed: {failure.error_count()} errors") from failure


def encode_line(message: PipeCommand | PipeReport) -> bytes:
    return message.model_dump_json().encode() + b"\n"


class PipeReader:
    """Lines from a non-blocking descriptor. `closed` once the other end is."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._rest = b""
        self.closed = False

    def read_lines(self) -> list[bytes]:
        """The complete lines that have arrived, or the first of very many: one that never pauses must not keep its
        reader from everybody else. ProtocolError if one is too long."""
        lines: list[bytes] = []
        for _ in range(_MAX_READS):
            try:
                data = os.read(self._descriptor, _READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.closed = True
                break
            *complete, self._rest = (self._rest + data).split(b"\n")
            lines += complete
            if len(self._rest) > MAX_LINE_BYTES:
                raise ProtocolError("a line is too long")
        return lines
