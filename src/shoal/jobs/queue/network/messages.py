"""What users and machines say to the daemon of a queue. Everything is checked before anybody acts on it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, PositiveInt, TypeAdapter, ValidationError

from shoal.jobs.queue.queue_store import HistoryRow
from shoal.net.errors import ProtocolError
from shoal.plan.queueing.entry import MAX_PRIORITY, QueueEntry
from shoal.plan.queueing.work import TRAINING, SubmittedWork
from shoal.spec.base import Spec
from shoal.spec.remote.file_requests import CodeArchive

MAX_CORES = 4096
T = TypeVar("T")
Key = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Cores = Annotated[int, Field(ge=1, le=MAX_CORES)]
Priority = Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)]


class QueueHello(Spec):
    """A user asks one thing. `key` names the digest of the token, here and below."""

    kind: Literal["user"] = "user"
    key: Key


class OfferHello(Spec):
    """A machine offers cores for as long as the connection lasts. `instance` is the process there: it may come again
    while the queue does not know yet that its former connection is broken."""

    kind: Literal["offer"] = "offer"
    key: Key
    instance: Key
    machine: Name
    cores: Cores
    memory_bytes: Annotated[int, Field(ge=0, lt=1 << 63)]


class ChannelHello(Spec):
    """A machine has started an agent. What follows are the agent's own lines."""

    kind: Literal["channel"] = "channel"
    key: Key
    channel: Key


class BridgeHello(Spec):
    """A run wants cores for one worker; see `fleet.agents.machine_bridge`."""

    run: Annotated[str, Field(min_length=1, max_length=300)]
    cores: Cores


class OpenMessage(Spec):
    """To a machine: start an agent, and connect it."""

    kind: Literal["open"] = "open"
    channel: Key


class RefusedMessage(Spec):
    """To a machine: it does not belong to the queue."""

    kind: Literal["refused"] = "refused"
    why: Annotated[str, Field(max_length=300)]


class PingMessage(Spec):
    """In both directions. The first one tells a machine that it belongs to the queue."""

    kind: Literal["ping"] = "ping"


class LeavingMessage(Spec):
    """From a machine: it takes no more workers, and those that it has leave."""

    kind: Literal["leaving"] = "leaving"


class SubmitRequest(Spec):
    """The job is that of a file which was read and checked. The archive of its directory follows, if it is wanted."""

    kind: Literal["submit"] = "submit"
    job: dict[str, Any]
    work: SubmittedWork = TRAINING
    priority: Priority = 0
    after: Annotated[list[PositiveInt], Field(max_length=1000)] = Field(default_factory=list)
    code: CodeArchive


class CompressionRequest(Spec):
    """Compress what a job of the queue trains."""

    kind: Literal["compress"] = "compress"
    of: PositiveInt
    sets: Annotated[list[Annotated[str, Field(max_length=10_000)]], Field(max_length=100)] = Field(default_factory=list)
    priority: Priority = 0
    after: Annotated[list[PositiveInt], Field(max_length=1000)] = Field(default_factory=list)


class LookRequest(Spec):
    kind: Literal["look"] = "look"


class HistoryRequest(Spec):
    kind: Literal["history"] = "history"
    number: PositiveInt | None = None


class ChangeRequest(Spec):
    kind: Literal["change"] = "change"
    number: PositiveInt
    what: Literal["cancel", "release", "priority"]
    priority: Priority = 0


class ServedAnswer(Spec):
    """`failure` has the fields of an error; then the others say nothing. `code_wanted`: the directory of the job must
    be sent; another answer follows."""

    failure: dict[str, str] = Field(default_factory=dict)
    code_wanted: bool = False
    entries: list[QueueEntry] = Field(default_factory=list)
    history: list[HistoryRow] = Field(default_factory=list)
    quotas: dict[str, int] = Field(default_factory=dict)
    daemon_pid: int = 0


Hello = QueueHello | OfferHello | ChannelHello
Request = SubmitRequest | CompressionRequest | LookRequest | HistoryRequest | ChangeRequest
ToMachine = OpenMessage | PingMessage | RefusedMessage
FromMachine = PingMessage | LeavingMessage

HELLO: TypeAdapter[Hello] = TypeAdapter(Annotated[Hello, Field(discriminator="kind")])
REQUEST: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="kind")])
TO_MACHINE: TypeAdapter[ToMachine] = TypeAdapter(Annotated[ToMachine, Field(discriminator="kind")])
FROM_MACHINE: TypeAdapter[FromMachine] = TypeAdapter(Annotated[FromMachine, Field(discriminator="kind")])
BRIDGE: TypeAdapter[BridgeHello] = TypeAdapter(BridgeHello)
ANSWER: TypeAdapter[ServedAnswer] = TypeAdapter(ServedAnswer)


def parse(adapter: TypeAdapter[T], data: bytes) -> T:
    """ProtocolError if it is malformed."""
    try:
        return adapter.validate_json(data)
    except ValidationError as failure:
        raise ProtocolError(f"a message is malformed: {failure.error_count()} errors") from failure


def encode(message: Spec) -> bytes:
    return message.model_dump_json().encode()
