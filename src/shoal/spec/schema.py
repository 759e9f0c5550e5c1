"""Types and choices of the fields of the models, and their description in plain words."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from shoal.spec.base import Ref, Spec


def union_members(kind: Any) -> list[Any]:
    """The alternatives of a union type, without None; the type itself if it is not a union."""
    if isinstance(kind, FieldInfo):
        bounded = Annotated[kind.annotation, *kind.metadata] if kind.metadata else kind.annotation
        return union_members(bounded)
    if get_origin(kind) in (Union, types.UnionType):
        return [m for part in get_args(kind) for m in union_members(part) if m is not type(None)]
    if get_origin(kind) is Annotated:
        inner = get_args(kind)[0]
        return union_members(inner) if get_origin(inner) in (Union, types.UnionType) else [kind]
    return [kind]


def strip_annotated(kind: Any) -> Any:
    """The type without its bounds."""
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def is_section(kind: Any) -> bool:
    return isinstance(strip_annotated(kind), type) and issubclass(strip_annotated(kind), Spec)


def sections_by_kind(alternatives: list[Any]) -> dict[str, type[Spec]]:
    """The sections of a union by their `kind`; {} if they have none."""
    found = {}
    for section in alternatives:
        if not is_section(section) or "kind" not in section.model_fields:
            return {}
        found.update(dict.fromkeys(map(str, literal_values(section.model_fields["kind"])), section))
    return found


def literal_values(kind: Any) -> list[Any]:
    """The values that a type with fixed choices allows."""
    return [
        c
        for m in union_members(kind)
        if get_origin(strip_annotated(m)) is Literal
        for c in get_args(strip_annotated(m))
    ]


def child_type(kind: Any, key: str | int) -> Any:
    """The type of an entry of a section, list or mapping; Any if unknown."""
    kind = strip_annotated(kind)
    if is_section(kind):
        return kind.model_fields.get(key, Any)
    args = get_args(kind)
    if get_origin(kind) is list:
        return args[0]
    if get_origin(kind) is dict:
        return args[1]
    if get_origin(kind) is tuple and isinstance(key, int) and key < len(args):
        return args[key]
    return Any


def matching_alternative(alternatives: list[Any], value: Any) -> Any:
    """The alternative that a value was probably written for."""
    sections = sections_by_kind(alternatives)
    if sections and isinstance(value, dict):
        return sections.get(str(value.get("kind")), Any)
    if len(alternatives) == 1:
        return alternatives[0]
    fits = is_section if isinstance(value, dict) else lambda kind: get_origin(strip_annotated(kind)) in (list, tuple)
    return next(filter(fits, alternatives), Any)


def booleans(kind: Any, value: Any, place: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Each boolean of plain data with its field and its type. The types of other fields are not looked up."""
    if isinstance(value, bool):
        yield place, kind, value
    elif found := [(key, item) for key, item in _items(value) if _has_booleans(item)]:
        inner = matching_alternative(union_members(kind), value)
        for key, item in found:
            yield from booleans(child_type(inner, key), item, f"{place}.{key}" if place else str(key))


def _has_booleans(value: Any) -> bool:
    return isinstance(value, bool) or any(_has_booleans(item) for _, item in _items(value))


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list) else ()


_TYPE_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_BOUND_WORDS = {"gt": "above {:g}", "ge": "of at least {:g}", "lt": "below {:g}", "le": "of at most {:g}"}


def describe_type(kind: Any) -> str:
    """The type of a field in plain words: "a whole number above 0"."""
    alternatives = union_members(kind)
    if len(alternatives) > 1 and (sections := sections_by_kind(alternatives)):
        return f"a section with `kind: {' | '.join(sections)}`"
    return " or ".join(dict.fromkeys(_describe_one(m) for m in alternatives))


def _describe_one(kind: Any) -> str:
    inner = strip_annotated(kind)
    if get_origin(inner) is Literal:
        return " or ".join(map(str, get_args(inner)))
    if get_origin(inner) is list:
        return f"a list (each item: {describe_type(get_args(inner)[0])})"
    if get_origin(inner) is tuple:
        return f"a list of {len(get_args(inner))} (each: {describe_type(get_args(inner)[0])})"
    if get_origin(inner) is dict:
        return "a section of `name: value` lines"
    if is_section(inner):
        return _describe_section(inner)
    limits = [limit for m in get_args(kind)[1:] for limit in _describe_bounds(m)] if inner is not kind else []
    return " ".join([_TYPE_WORDS.get(inner, "a value"), " and ".join(limits)]).strip()


def _describe_section(kind: type[Spec]) -> str:
    if issubclass(kind, Ref):
        return "a name (package.module:name or file.py:name), or a section with `name` and `args`"
    return f"a section with the fields {', '.join(kind.model_fields)}"


def _describe_bounds(bound: Any) -> list[str]:
    """A bound in words; pydantic keeps some bounds inside a FieldInfo."""
    if isinstance(bound, FieldInfo):
        return [word for m in bound.metadata for word in _describe_bounds(m)]
    values = {name: getattr(bound, name, None) for name in _BOUND_WORDS}
    return [_BOUND_WORDS[name].format(value) for name, value in values.items() if value is not None]


def describe_value(value: Any) -> str:
    """A value in plain words."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"{str(value).lower()} (unquoted yes, no, on and off mean true or false)"
    if isinstance(value, str):
        return f"the text '{value if len(value) < 60 else value[:57] + '…'}'"
    if isinstance(value, int | float):
        return f"the number {value}"
    return "a list" if isinstance(value, list | tuple) else "a section"
