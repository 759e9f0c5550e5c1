"""`--set path.to.field=value`: one field of a job file, changed from the command line."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from shoal.errors import ShoalError, error
from shoal.spec import schema
from shoal.spec.base import Ref, Spec
from shoal.spec.yaml_document import SET_OPTION, YamlDocument, parse_value


def apply_overrides(document: YamlDocument, assignments: Sequence[str], *, model: type[Spec]) -> YamlDocument:
    """The document with each `path=value` applied; missing sections on the path are created."""
    data, lines = copy.deepcopy(document.data), dict(document.lines)
    for assignment in assignments:
        path, value = _parse(assignment)
        made = _set_field(data, path.split("."), value, model=model)
        for field in [f for f in lines if f.startswith(f"{path}.")]:
            del lines[field]
        lines.update(dict.fromkeys([*made, path], SET_OPTION))
    return YamlDocument(document.name, data, lines)


def _parse(assignment: str) -> tuple[str, Any]:
    path, equals, text = assignment.partition("=")
    path = path.strip()
    if not equals or not path or any(not part.strip() for part in path.split(".")):
        raise _override_error(assignment, f"'{assignment}' is not path=value")
    return path, parse_value(text, name=f"{SET_OPTION} {path}")


def _set_field(data: dict[str, Any], path: Sequence[str], value: Any, *, model: type[Spec]) -> list[str]:
    """Walk down data and models together; a short form on the path (`optimizer: AdamW`) is expanded.

    Returns the sections that were created.
    """
    made = []
    here: Any = data
    kind: Any = model
    for i, key in enumerate(path[:-1]):
        place, slot = ".".join(path[: i + 1]), _key_or_index(here, key, ".".join(path))
        kind = schema.child_type(schema.matching_alternative(schema.union_members(kind), here), slot)
        if isinstance(here, dict) and here.get(key) is None:
            here[slot] = {}
            made.append(place)
        elif not isinstance(here[slot], dict | list):
            here[slot] = _expand_short_form(here[slot], kind, place, path)
        here = here[slot]
    last = _key_or_index(here, path[-1], ".".join(path))
    if last == "kind" and here.get("kind", value) != value:
        here.clear()  # what one kind needs means nothing to another
    here[last] = value
    return made


def _key_or_index(here: Any, key: str, path: str) -> str | int:
    if isinstance(here, dict):
        return key
    if key.isdecimal() and int(key) < len(here):
        return int(key)
    count = f"{len(here)} items, 0 to {len(here) - 1}" if here else "no items"
    raise _override_error(path, f"the list has {count}; there is no '{key}'")


def _expand_short_form(value: Any, kind: Any, place: str, path: Sequence[str]) -> dict[str, Any]:
    alternatives = [schema.strip_annotated(k) for k in schema.union_members(kind)]
    if any(schema.is_section(k) and issubclass(k, Ref) for k in alternatives) and isinstance(value, str):
        return {"name": value}
    if schema.sections_by_kind(alternatives) and isinstance(value, str):
        return {"kind": value}
    if len(alternatives) == 1 and schema.is_section(alternatives[0]):
        try:
            return dict(alternatives[0].model_validate(value).model_dump(exclude_unset=True))
        except ValidationError:
            pass
    raise _override_error(
        ".".join(path), f"`{place}` is {schema.describe_value(value)}, not a section: it has no fields"
    )


def _override_error(path: str, message: str) -> ShoalError:
    return error("SH109", message, where=f"{SET_OPTION} {path}")
