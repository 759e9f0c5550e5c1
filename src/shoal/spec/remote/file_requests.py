"""What a worker without the run's directory asks its driver for: files, as checked requests.

A worker reads and writes in areas of the run, and nowhere else. Paths are relative to the area.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, NonNegativeInt, ValidationError, field_validator

from shoal.spec.base import Spec
from shoal.spec.view import Role

JOB_FILE = "job.yaml"
"""The job, in the area `code`: a server reads it before it connects."""
MAX_PATH_CHARACTERS = 1024
MAX_PATH_PARTS = 16
MAX_PART_BYTES = 255

Area = Literal["checkpoints", "model", "trace", "code"]
Operation = Literal["read", "write", "append", "remove", "sizes", "lock", "unlock"]
ALLOWED: dict[str, frozenset[str]] = {
    "checkpoints": frozenset({"read", "write", "remove", "sizes", "lock", "unlock"}),
    "model": frozenset({"write", "remove"}),
    "trace": frozenset({"append"}),
    "code": frozenset({"read"}),
}
"""The operations of each area."""


class FileMessage(Spec):
    """Base: no value is converted."""

    model_config = ConfigDict(strict=True)


class FilesHello(FileMessage):
    """The greeting of a connection for files. `key` proves that the driver gave the seat to this process, which is a
    worker or a server."""

    role: Literal["files"]
    process: Role = "worker"
    seat: Annotated[int, Field(ge=0, lt=10**9)]
    key: Annotated[str, Field(max_length=256)]


class FileRequest(FileMessage):
    """`write` and `append` are followed by the content. `exclusive`: a lock that fails if anybody else holds one."""

    operation: Operation
    area: Area
    path: Annotated[str, Field(max_length=MAX_PATH_CHARACTERS)] = ""
    exclusive: bool = False

    @field_validator("path")
    @classmethod
    def _stays_inside(cls, path: str) -> str:
        return check_path(path)


class FileAnswer(FileMessage):
    """`size_bytes` of content follow. `number` and `message` are those of an OSError; `taken`: whether a lock was."""

    size_bytes: NonNegativeInt = 0
    number: Annotated[int, Field(ge=0, lt=4096)] = 0
    message: Annotated[str, Field(max_length=1000)] = ""
    taken: bool = True


class CodeArchive(FileMessage):
    """The job's directory as the driver sends it: one archive, named by its content."""

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    size_bytes: NonNegativeInt


class SentWeights(FileMessage):
    """Weights as the driver sends them: an archive, and what to load in it."""

    archive: CodeArchive
    path: Annotated[str, Field(max_length=MAX_PATH_CHARACTERS)]

    @field_validator("path")
    @classmethod
    def _stays_inside(cls, path: str) -> str:
        return check_path(path)


class RemoteRun(FileMessage):
    """What a worker without the run's directory must know of it: its code, the weights that it starts from and learns
    from, and where its checkpoints are."""

    code: CodeArchive
    init_from: SentWeights | None = None
    teacher: SentWeights | None = None
    store_name: Annotated[str, Field(max_length=255)]
    namespace: Annotated[str, Field(max_length=64)] = ""
    trace: bool = False


def check_path(path: str) -> str:
    """ValueError if it leads out of its directory."""
    if path and (path.count("/") >= MAX_PATH_PARTS or not is_inside(path)):
        raise ValueError("it is not a path inside the area")
    return path


def is_inside(path: str) -> bool:
    """Whether a relative path names something below its directory."""
    return all(map(_is_part, path.split("/")))


def parse_request(data: bytes) -> FileRequest:
    """ValueError if it is malformed, or asks for what the area does not offer."""
    try:
        request = FileRequest.model_validate_json(data)
    except ValidationError as failure:
        raise ValueError("the request is malformed") from failure
    if request.operation not in ALLOWED[request.area]:
        raise ValueError(f"'{request.area}' does not offer '{request.operation}'")
    if not request.path and request.operation in ("read", "write", "append", "remove"):
        raise ValueError("the request names no file")
    return request


def _is_part(part: str) -> bool:
    return part not in ("", ".", "..") and "\0" not in part and len(part.encode("utf-8", "replace")) <= MAX_PART_BYTES
