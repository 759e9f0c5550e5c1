"""One event, and one kind of events with the types of its fields."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from shoal.events.checks import MAX_FLOAT, MAX_INT, Check, make_check

_TYPE_NAMES = {int: "int", float: "float", str: "text", bool: "bool"}


@dataclass(frozen=True)
class Event:
    """One event: its kind, time, writing process and step, and the fields of its kind."""

    kind: str
    t: float = 0.0
    who: str = ""
    step: int | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)


def kind_name(fields_class: type) -> str:
    """`worker_died` for `WorkerDiedEvent`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", fields_class.__name__.removesuffix("Event")).lower()


class EventKind:
    """One kind: its class, and a check for each field. Kinds with `open_fields` accept any fields; kinds that are not
    `in_stream` never occur in a run's stream."""

    def __init__(self, fields_class: Any, *, in_stream: bool, open_fields: bool) -> None:
        self.name = kind_name(fields_class)
        self.fields_class = fields_class  # a NamedTuple, because it is the fastest to create
        self.in_stream = in_stream
        self.open_fields = open_fields
        self.hints = get_type_hints(fields_class, include_extras=True)
        self._checks: dict[str, Check] = {name: make_check(hint) for name, hint in self.hints.items()}
        plain = {name: _plain_hint(hint) for name, hint in self.hints.items()}
        self._usual_types = {name: hint for name, hint in plain.items() if hint in _TYPE_NAMES}
        self._required: frozenset[str] = frozenset(self._checks.keys() - self.fields_class._field_defaults.keys())

    def accepts(self, fields: Mapping[str, Any]) -> bool:
        """Whether all required fields are present and all known ones have the right type. Unknown fields may occur."""
        usual, checks = self._usual_types, self._checks
        for name, value in fields.items():
            kind = type(value)
            if kind is usual.get(name) and (  # avoids a function call for most values
                (-MAX_FLOAT < value < MAX_FLOAT) if kind is float else kind is not int or 0 <= value < MAX_INT
            ):
                continue
            if name in checks and not checks[name](value):
                return False
        return not self._required or self._required <= fields.keys()

    def fits_types(self, fields: Mapping[str, Any]) -> bool:
        """The cheap check before writing; unknown fields fail it. Numbers of the usual type may have any value."""
        usual = self._usual_types
        for name, value in fields.items():
            if type(value) is not usual.get(name) and (name not in self._checks or not self._checks[name](value)):
                return self.open_fields
        return not self._required or self._required <= fields.keys()

    def problems(self, fields: Mapping[str, Any]) -> dict[str, str]:
        """Why each invalid field must not be written."""
        if self.open_fields:
            return {}
        found = dict.fromkeys(sorted(self._required - fields.keys()), "is missing")
        for name, value in fields.items():
            if name not in self._checks:
                found[name] = "is not in the schema"
            elif not self._checks[name](value):
                found[name] = f"is {value!r:.100}, not {type_name(name, self.hints[name])}"
        return found

    def wrong_fields(self, fields: Mapping[str, Any]) -> set[str]:
        """Known fields with a value of the wrong type."""
        return {name for name, value in fields.items() if name in self._checks and not self._checks[name](value)}

    def typed(self, fields: Mapping[str, Any]) -> Any:
        """The fields as an instance of the kind's class, without unknown fields."""
        try:
            return self.fields_class(**fields)
        except TypeError:
            return self.fields_class(**{name: value for name, value in fields.items() if name in self._checks})


def _plain_hint(hint: Any) -> Any:
    """The type without annotations and without None."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _plain_hint(arguments[0])
    if origin in (Union, types.UnionType):
        return _plain_hint(next(one for one in arguments if one is not type(None)))
    return hint


def type_name(name: str, hint: Any) -> str:
    """The unit or type of a field as one word."""
    if name.endswith("_bytes_s"):
        return "bytes/s"
    if name.endswith("_s"):
        return "s"
    if name.endswith("_bytes") or name.startswith("bytes_"):
        return "bytes"
    plain = _plain_hint(hint)
    return "list" if get_origin(plain) in (list, Sequence) else _TYPE_NAMES.get(plain, "object")
