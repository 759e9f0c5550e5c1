"""Everything that a process may say to its driver, as checked data. The driver acts on nothing else.

A greeting names the caller's role, and the role decides which messages may follow. Types are exact, numbers are finite
and within bounds, texts are short, and unknown kinds and fields are refused. What a caller may claim about the run (its
seat, its position, its result) is decided by whoever handles the message.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator

from shoal.fleet.profile_request import ProfileRequest
from shoal.net.errors import ProtocolError
from shoal.spec.base import Spec
from shoal.spec.chunk_table import ChunkTable
from shoal.spec.job import MAX_WORKERS
from shoal.spec.view import MAX_SEAT, Address, Attachment, Role

MAX_VIEW = 1 << 31
MAX_CUTS = 1 << 16
MAX_ERROR_CHARACTERS = 8000
MAX_LINE_CHARACTERS = 4000
MAX_REASON_CHARACTERS = 200
MAX_ROW_CHARACTERS = 1 << 20
MAX_PIECE_CHARACTERS = 1 << 19

SeatNumber = Annotated[int, Field(ge=0, lt=MAX_SEAT)]
ViewNumber = Annotated[int, Field(ge=0, lt=MAX_VIEW)]
Position = Annotated[int, Field(ge=0, lt=1 << 53)]
Quantity = Annotated[int, Field(ge=0, lt=1 << 63)]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Name = Annotated[str, Field(max_length=256)]


def _is_error(fields: dict[str, str]) -> dict[str, str]:
    if not {"code", "message"} <= fields.keys():
        raise ValueError("an error has a code and a message")
    return fields


ErrorFields = Annotated[
    dict[Name, Annotated[str, Field(max_length=MAX_ERROR_CHARACTERS)]], Field(max_length=8), AfterValidator(_is_error)
]
"""An error of another process; see `error_from_fields`."""


class Message(Spec):
    """Base of all messages: no value is converted."""

    model_config = ConfigDict(strict=True)


# ---- greetings ----


class WorkerHello(Message):
    """`key` proves that the driver gave the seat to this process. `nonce` is a random text that the process made when
    it started: a seat belongs to the first process that takes it. `agent` is the secret of the `shoal join` that
    started it. `view` and `table` are the newest that it has seen, maybe from an earlier driver. `platform`: see
    `platform_facts`."""

    role: Literal["worker"]
    seat: SeatNumber | None
    key: Name = ""
    nonce: Name = ""
    agent: Name = ""
    attachment: Attachment
    pid: Annotated[int, Field(ge=0, lt=1 << 31)]
    host: Name
    address: Address
    view: ViewNumber
    training: bool
    table: ChunkTable | None = None
    platform: Annotated[dict[Name, Name], Field(max_length=16)] = Field(default_factory=dict)


class ServerHello(Message):
    """See `WorkerHello`. Only the run's engine starts servers."""

    role: Literal["server"]
    seat: SeatNumber
    key: Name = ""
    attachment: Attachment
    pid: Annotated[int, Field(ge=0, lt=1 << 31)]
    host: Name
    address: Address
    table: ChunkTable | None = None
    view: ViewNumber = 0
    training: bool = False


class AgentHello(Message):
    """`agent` is a secret that the agent shares with the workers that it starts."""

    role: Literal["agent"]
    host: Name
    agent: Name = ""


class UserHello(Message):
    """`key` proves that the user can read the run's directory. Without it the driver carries out no command."""

    role: Literal["user"]
    key: Name = ""


Hello = WorkerHello | ServerHello | AgentHello | UserHello


# ---- messages of workers and servers ----


class UsageFields(Message):
    """What a worker uses; see the event `usage`."""

    cpu: Annotated[float, Field(ge=0, le=1e6)]
    rss_bytes: Quantity
    room_bytes: Quantity
    net_bytes_s: Quantity = 0
    device_bytes: Quantity | None = None
    device_total_bytes: Quantity | None = None


class BeatMessage(Message):
    """A heartbeat: what the training thread does now, see `train.activity`, and counters. `served` is a server's."""

    kind: Literal["beat"]
    phase: Name = ""
    step: Position = 0
    units: Quantity = 0
    units_in_phase: Quantity = 0
    since_s: Seconds = 0.0
    moved_bytes: Quantity = 0
    lane_s: Seconds | None = None
    lanes_timed: Quantity = 0
    lanes_timed_s: Seconds = 0.0
    line: Annotated[str, Field(max_length=8192)] = ""
    leaving: bool = False
    usage: UsageFields | None = None
    refused: Quantity = 0
    served_bytes: Quantity = 0
    served: Annotated[dict[Name, Annotated[float, Field(ge=0, le=1e30)]], Field(max_length=64)] = Field(
        default_factory=dict
    )


class StandingMessage(Message):
    """A worker has stopped at `position` (None: it holds no state); `view` is the last that it adopted."""

    kind: Literal["standing"]
    view: ViewNumber
    position: Position | None
    saved: bool = False


class CutsMessage(Message):
    """Where the parameters may be cut into chunks."""

    kind: Literal["cuts"]
    cuts: Annotated[list[Quantity], Field(min_length=2, max_length=MAX_CUTS)]

    @field_validator("cuts")
    @classmethod
    def _ascending(cls, cuts: list[int]) -> list[int]:
        if any(a >= b for a, b in pairwise(cuts)):
            raise ValueError("cuts must ascend")
        return cuts


class EventMessage(Message):
    """An event of a worker that cannot reach the run's directory, as a row of the stream."""

    kind: Literal["event"]
    row: Annotated[str, Field(max_length=MAX_ROW_CHARACTERS)]


class FoundMessage(Message):
    """A piece, in base64, of the stacks or of the profile of a worker that cannot reach the run's directory. `profile`:
    its name, or '' for stacks."""

    kind: Literal["found"]
    profile: Annotated[str, Field(pattern=r"^[0-9a-f-]{0,40}$")] = ""
    piece: Annotated[str, Field(max_length=MAX_PIECE_CHARACTERS)]
    is_last: bool


class ByeMessage(Message):
    """The process ends as it should."""

    kind: Literal["bye"]


class FilledMessage(Message):
    """Under this table, the server `seat` has received all its chunks from the sender."""

    kind: Literal["filled"]
    seat: SeatNumber
    table: Quantity


# ---- reports of agents ----


class ExitedReport(Message):
    """A process has exited; see `Exit`. `errors` is the end of its standard error, `start_error` the fields of an
    error."""

    kind: Literal["exited"] = "exited"
    seat: SeatNumber
    code: Annotated[int, Field(ge=-64, le=255)] | None
    reason: Name
    errors: Annotated[str, Field(max_length=MAX_ERROR_CHARACTERS)] = ""
    start_error: ErrorFields | None = None


class OutputReport(Message):
    """A line that a process printed; a long line is truncated."""

    kind: Literal["output"] = "output"
    seat: SeatNumber
    text: Annotated[str, Field(max_length=MAX_LINE_CHARACTERS)]


AgentReport = ExitedReport | OutputReport


# ---- commands of users ----


class ScaleRequest(Message):
    """The wanted number of workers, of servers, or both."""

    kind: Literal["scale"]
    wanted: Annotated[int, Field(ge=1, le=MAX_WORKERS)] | None = None
    servers: Annotated[int, Field(ge=1, le=MAX_WORKERS)] | None = None

    @model_validator(mode="after")
    def _names_a_number(self) -> ScaleRequest:
        if self.wanted is None and self.servers is None:
            raise ValueError("it names no number")
        return self


class DrainRequest(Message):
    """Let a worker or server leave once others hold its state."""

    kind: Literal["drain"]
    seat: SeatNumber
    role: Role = "worker"


class StopRequest(Message):
    """Save, and end the run."""

    kind: Literal["stop"]


class InspectRequest(Message):
    """Let the workers that cannot reach the run's directory send their stacks, or a profile of some steps."""

    kind: Literal["inspect"]
    profile: ProfileRequest | None = None


WorkerMessage = BeatMessage | StandingMessage | CutsMessage | EventMessage | FoundMessage | ByeMessage
ServerMessage = BeatMessage | FilledMessage | ByeMessage
AgentMessage = BeatMessage | ExitedReport | OutputReport | ByeMessage
UserRequest = ScaleRequest | DrainRequest | StopRequest | InspectRequest

MessageUnion = TypeVar("MessageUnion")


_HELLO: TypeAdapter[Hello] = TypeAdapter(Annotated[Hello, Field(discriminator="role")])
_WORKER: TypeAdapter[WorkerMessage] = TypeAdapter(Annotated[WorkerMessage, Field(discriminator="kind")])
_SERVER: TypeAdapter[ServerMessage] = TypeAdapter(Annotated[ServerMessage, Field(discriminator="kind")])
_AGENT: TypeAdapter[AgentMessage] = TypeAdapter(Annotated[AgentMessage, Field(discriminator="kind")])
_USER: TypeAdapter[UserRequest] = TypeAdapter(Annotated[UserRequest, Field(discriminator="kind")])


def parse_hello(fields: Mapping[str, Any]) -> Hello:
    """The greeting. ProtocolError if it is malformed."""
    return _parse(_HELLO, dict(fields))


def parse_worker_message(kind: str, fields: Mapping[str, Any]) -> WorkerMessage:
    """ProtocolError if a worker may not say this; likewise below."""
    return _parse(_WORKER, {**fields, "kind": kind})


def parse_server_message(kind: str, fields: Mapping[str, Any]) -> ServerMessage:
    return _parse(_SERVER, {**fields, "kind": kind})


def parse_agent_message(kind: str, fields: Mapping[str, Any]) -> AgentMessage:
    return _parse(_AGENT, {**fields, "kind": kind})


def parse_user_request(kind: str, fields: Mapping[str, Any]) -> UserRequest:
    return _parse(_USER, {**fields, "kind": kind})


def _parse(adapter: TypeAdapter[MessageUnion], fields: dict[str, Any]) -> MessageUnion:
    try:
        return adapter.validate_python(fields)
    except ValidationError as failure:
        first = failure.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ProtocolError(printable(f"{where}: {first['msg']}" if where else first["msg"])) from None
    except RecursionError:
        raise ProtocolError("it is nested too deeply") from None


def printable(text: str, *, limit: int = MAX_REASON_CHARACTERS) -> str:
    """The text on one line for people: control characters, and characters that change the direction or cannot be
    written, become "?"."""
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return "".join(one if one.isprintable() else "?" for one in cut)
