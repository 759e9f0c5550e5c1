"""What a caller says first: who it is, and what the connection is for. Checked before anybody acts on it."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from shoal.net.errors import ProtocolError
from shoal.spec.base import Spec

Purpose = Literal["mesh", "state", "follow", "memory", "pace", "push", "chain"]
"""The exchange of a view, the state, the state stream, residuals, a link measurement; a client or another server of a
parameter server."""
Seat = Annotated[int, Field(ge=0, lt=1 << 31)]
ViewNumber = Annotated[int, Field(ge=0, lt=1 << 32)]
Step = Annotated[int, Field(ge=0, le=1 << 62)]
ConnectionNumber = Annotated[int, Field(ge=0, lt=1 << 53)]


class Greeting(Spec):
    """`seat` is the caller's, `view` the number of its view (of its chunk table, if a server calls a server).

    A caller that may connect again names itself (`caller`) and numbers its connections. Handshakes end in any order, so
    only the number says which connection is the newer one. `step` and `lanes` say which residuals a peer asks for.
    """

    model_config = ConfigDict(strict=True)

    purpose: Purpose
    seat: Seat
    view: ViewNumber
    caller: Annotated[str, Field(max_length=32)] = ""
    connection: ConnectionNumber = 0
    step: Step | None = None
    lanes: list[Seat] | None = None

    @model_validator(mode="after")
    def _asks_for_residuals(self) -> Greeting:
        wanted = self.purpose == "memory"
        if (self.step is not None, self.lanes is not None) != (wanted, wanted):
            raise ValueError("`step` and `lanes` belong to the purpose `memory`")
        return self

    @classmethod
    def parse(cls, raw: bytes) -> Greeting:
        """ProtocolError for anything else."""
        try:
            return cls.model_validate_json(raw)
        except ValidationError as failure:
            problem = failure.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, problem["loc"]))
            raise ProtocolError(f"a malformed greeting: {where} {problem['msg']}") from None

    def encode(self) -> bytes:
        return self.model_dump_json(exclude_defaults=True).encode()

    def is_older_than(self, other: Greeting) -> bool:
        """Whether the same caller made the other connection later."""
        return bool(self.caller) and self.caller == other.caller and self.connection < other.connection


@dataclass(frozen=True)
class Caller:
    """Numbers the connections that one process makes. Any thread may call `next_connection`."""

    name: str = field(default_factory=lambda: secrets.token_hex(8))
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def next_connection(self) -> int:
        return next(self._numbers)
