"""Checks of plain JSON values, derived once from type hints: a check returns whether a value fits, and never raises."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints, is_typeddict

Check = Callable[[Any], bool]

MAX_INT = 1 << 63
MAX_FLOAT = 1.7e308


def is_int(value: Any) -> bool:
    return type(value) is int and -MAX_INT <= value < MAX_INT


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_INT


def is_finite(value: Any) -> bool:
    """Whether the value is an int or float that is neither NaN nor infinite."""
    kind = type(value)
    return (kind is float or kind is int or isinstance(value, float)) and -MAX_FLOAT < value < MAX_FLOAT


def is_number(value: Any) -> bool:
    """Whether the value is an int or float, NaN included: a loss may be NaN."""
    return type(value) is float or is_finite(value) or isinstance(value, float)


def is_json(value: Any) -> bool:
    return True


Count = Annotated[int, is_count]
Number = Annotated[float, is_number]

_PLAIN: dict[Any, Check] = {
    int: is_int,
    float: is_finite,
    str: lambda value: isinstance(value, str),
    bool: lambda value: value is True or value is False,
    type(None): lambda value: value is None,
    dict: lambda value: isinstance(value, dict),
    Any: is_json,
}


def make_check(hint: Any) -> Check:
    """The check for a type hint: numbers, texts, unions, lists, mappings with text keys, and TypedDicts or dataclasses
    written as mappings. A function in `Annotated` is the check itself."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return next((one for one in arguments[1:] if callable(one)), None) or make_check(arguments[0])
    if origin in (Union, types.UnionType):
        return _any_of([make_check(one) for one in arguments])
    if origin in (list, Sequence):
        return _all_items(make_check(arguments[0]))
    if origin in (dict, Mapping):
        return _all_values(make_check(arguments[1]))
    if is_typeddict(hint):
        checks = {name: make_check(one) for name, one in get_type_hints(hint, include_extras=True).items()}
        return _has_keys(checks, required=hint.__required_keys__)
    if dataclasses.is_dataclass(hint):
        checks = {name: make_check(one) for name, one in get_type_hints(hint, include_extras=True).items()}
        return _has_exactly(checks)
    return _PLAIN[hint]


def _any_of(checks: list[Check]) -> Check:
    if len(checks) == 2:
        first, second = checks
        return lambda value: first(value) or second(value)
    return lambda value: any(check(value) for check in checks)


def _all_items(check: Check) -> Check:
    return lambda value: isinstance(value, list | tuple) and all(map(check, value))


def _all_values(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(type(k) is str and check(v) for k, v in value.items())


def _has_keys(checks: Mapping[str, Check], *, required: frozenset[str]) -> Check:
    def check(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and required <= value.keys()
            and all(one(value[name]) for name, one in checks.items() if name in value)
        )

    return check


def _has_exactly(checks: Mapping[str, Check]) -> Check:
    def check(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and value.keys() == checks.keys()
            and all(one(value[name]) for name, one in checks.items())
        )

    return check
