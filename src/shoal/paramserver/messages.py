"""The JSON payloads of frames between clients and servers, checked before anybody acts on them."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, ValidationError

from shoal.net.errors import LinkError
from shoal.paramserver.protocol import MAX_STEP, check_json
from shoal.spec.base import Spec

Step = Annotated[int, Field(ge=0, le=MAX_STEP)]
Message = TypeVar("Message", bound="JsonPayload")


class JsonPayload(Spec):
    """Numbers may be infinite or NaN: gradients and learning rates of users are."""

    model_config = ConfigDict(strict=True, allow_inf_nan=True)


class EnterRequest(JsonPayload):
    """A client enters a view: the lanes of each seat, the model, whether it restores the servers' state, and whether
    that is done."""

    carries: dict[str, list[int]]
    model: dict[str, Any]
    lead: bool = False
    ready: bool = False


class JoinRequest(JsonPayload):
    """A predecessor connects."""

    model: dict[str, Any]


class HyperparameterUpdate(JsonPayload):
    """The options of each of the optimizer's parameter groups, and the value at which gradients are clipped."""

    groups: list[dict[str, Any]]
    clip_value: float | None = None


class ApplyRequest(JsonPayload):
    """The divisor of the loss and the coefficient of clipping."""

    count: float | None = None
    coefficient: float | None = None


class ServerStatus(JsonPayload):
    """Lowest and highest applied step of a server's primary chunks, if it has any; `set` if all of them have state."""

    set: bool
    low: Step | None = None
    high: Step | None = None


class Admission(JsonPayload):
    """The next step of each lane, or of all lanes together. Empty from a server without primary chunks."""

    clocks: list[Step]


class RowsSnapshot(JsonPayload):
    """Digests of the rows of each chunk, the number of rows of each table, and where they were saved."""

    digests: list[str]
    rows: list[Annotated[int, Field(ge=0)]]
    saved: dict[str, Any] | None


def parse_message(kind: type[Message], raw: bytes | bytearray | memoryview) -> Message:
    """LinkError if the payload is anything else."""
    try:
        return kind.model_validate_json(check_json(raw))
    except ValidationError as failure:
        problem = failure.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise LinkError(f"sent no {kind.__name__}: {where} {problem['msg']}"[:200]) from None


def with_changed_numbers(options: dict[str, Any], initial: dict[str, Any]) -> bool:
    """Whether an optimizer that takes the initial options takes these: a number may become another number, and a list
    of numbers another one as long. Everything else stays as it was."""
    return all(_alike(options[name], value) for name, value in initial.items() if name in options) and all(
        _is_number(value) or value is None or isinstance(value, str | bool)
        for name, value in options.items()
        if name not in initial
    )


def _alike(new: Any, old: Any) -> bool:
    if isinstance(old, list | tuple):
        return isinstance(new, list) and len(new) == len(old) and all(map(_alike, new, old))
    return _is_number(new) if _is_number(old) else type(new) is type(old) and new == old


def _is_number(value: Any) -> bool:
    """Also one that a float can hold."""
    return type(value) is float or (type(value) is int and abs(value) < 1 << 63)
