"""Pydantic's errors as Shoal's errors: in plain words, with the field as the user wrote it, and a fix."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from shoal.errors import ShoalError, did_you_mean, error
from shoal.spec import schema
from shoal.spec.base import Ref, Spec
from shoal.spec.data import DataConfig
from shoal.spec.migrate import RENAMED_FIELDS

# Field names of other tools at the top of a job, and the field to write instead.
_NAMES_IN_OTHER_TOOLS = {
    "lr": "optimizer.args.lr",
    "learning_rate": "optimizer.args.lr",
    "weight_decay": "optimizer.args.weight_decay",
    "momentum": "optimizer.args.momentum",
    "dataset": "data.source",
    "scheduler": "schedule",
    "max_epochs": "epochs",
    "num_epochs": "epochs",
    "max_steps": "steps",
    "early_stopping": "stop_early",
    "num_workers": "data.loader.workers",
    "criterion": "loss",
    "gradient_clip_val": "clip.norm",
}


@dataclass(frozen=True)
class FieldProblem:
    """One pydantic error, with its place found in the models.

    `path` is the field as the user wrote it, without pydantic's union tags; `expected_type` its type; `section` the
    section around it; `alternatives` the other sections that are allowed there, by kind; `union_path` the path of the
    plain union (text or a list) in which the error occurred.
    """

    code: str
    path: str
    expected_type: Any
    section: Any
    alternatives: Mapping[str, type[Spec]]
    value: Any
    context: Mapping[str, Any]
    union_path: str | None

    @property
    def field_name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def parent_path(self) -> str:
        return self.path.rpartition(".")[0]


def explain(failure: ValidationError, *, model: type[Spec]) -> list[ShoalError]:
    """Each problem once. `where` of each error is the field."""
    faults = [_locate(raw, model) for raw in failure.errors(include_url=False)]
    by_path = {f.path: _as_shoal_error(f) for f in reversed(list(_deepest(faults)))}
    return list(reversed(by_path.values()))


def stray_booleans(data: Mapping[str, Any], *, model: type[Spec]) -> list[ShoalError]:
    """Errors for booleans where a number is expected: `epochs: yes` is true in YAML and 1 in pydantic."""
    numbers = (int, float)
    return [
        _wrong_type(place, kinds, value)
        for place, kind, value in schema.booleans(model, dict(data))
        if (kinds := schema.union_members(kind))
        if all(schema.strip_annotated(k) in numbers for k in kinds)
    ]


def _locate(raw: Mapping[str, Any], model: type[Spec]) -> FieldProblem:
    """Follow pydantic's location through the models; tags and labels of unions are not part of the path."""
    place: list[str] = []
    kind: Any = model
    section: Any = model
    sections: dict[str, type[Spec]] = {}
    others: Mapping[str, type[Spec]] = {}
    union = None
    for step in raw["loc"]:
        alternatives = schema.union_members(kind)
        if len(alternatives) > 1:
            sections = schema.sections_by_kind(alternatives)
            union = union if sections else ".".join(place)
            kind = sections.get(str(step)) or _alternative_by_label(alternatives, str(step))
            continue
        section, kind = alternatives[0], schema.child_type(alternatives[0], step)
        others, sections = sections, {}
        place.append(str(step))
    return FieldProblem(
        code=raw["type"],
        path=".".join(place),
        expected_type=kind,
        section=section,
        alternatives=others,
        value=raw["input"],
        context=raw.get("ctx", {}),
        union_path=union,
    )


def _alternative_by_label(alternatives: list[Any], label: str) -> Any:
    """The alternative that pydantic calls `list[str]`, `str`, `constrained-int` and the like."""
    word = label.partition("[")[0].rpartition("-")[2]
    return next((a for a in alternatives if word in str(schema.strip_annotated(a)).lower()), Any)


def _deepest(faults: list[FieldProblem]) -> Iterator[FieldProblem]:
    """For each plain union the problem that got furthest, or one problem for the whole union."""
    for fault in faults:
        inside = any(f.union_path == fault.union_path and f.path != fault.union_path for f in faults)
        if fault.union_path is None or fault.path != fault.union_path or not inside:
            yield fault


def _as_shoal_error(fault: FieldProblem) -> ShoalError:
    if fault.union_path == fault.path:
        return _whole_union(fault)
    for types, tell in _HANDLERS:
        if fault.code in types:
            return tell(fault)
    if fault.code.endswith(("_type", "_parsing", "_from_float")):
        is_name = fault.field_name == "name" and _is_ref(fault.section)
        return _wrong_type(fault.path, fault.section if is_name else fault.expected_type, fault.value)
    return _out_of_range(fault)


def _is_ref(section: Any) -> bool:
    return schema.is_section(section) and issubclass(schema.strip_annotated(section), Ref)


def _whole_union(fault: FieldProblem) -> ShoalError:
    union = schema.child_type(fault.section, fault.field_name)
    return _wrong_type(fault.path, union, fault.value)


def _unknown_field(fault: FieldProblem) -> ShoalError:
    name, section = fault.field_name, schema.strip_annotated(fault.section)
    if renamed := RENAMED_FIELDS.get(fault.path):
        return error("SH111", f"`{fault.path}` is now called `{renamed}`", where=fault.path, fix=f"Write {renamed}.")
    inside = f" in `{fault.parent_path}`" if fault.parent_path else ""
    fix = did_you_mean(name, section.model_fields)
    if _is_ref(section):
        inside += ", which takes a name and its arguments"
        fix = f"Arguments belong under `args`: {fault.parent_path}.args.{name}. {fix}"
    elif takers := [kind for kind, other in fault.alternatives.items() if name in other.model_fields]:
        fix = f"'{name}' is for kind {', '.join(takers)}. {fix}"
    elif not fault.parent_path and name in _NAMES_IN_OTHER_TOOLS:
        fix = f"Write {_NAMES_IN_OTHER_TOOLS[name]}."
    elif not fault.parent_path and name in DataConfig.model_fields:
        fix = f"It belongs into the section data: write data.{name}."
    return error("SH103", f"unknown field '{name}'{inside}", where=fault.path, fix=fix)


def _missing_field(fault: FieldProblem) -> ShoalError:
    message = f"the field '{fault.field_name}' is missing" + (f" in `{fault.parent_path}`" if fault.parent_path else "")
    fix = f"Add `{fault.field_name}:` with {schema.describe_type(fault.expected_type)}."
    return error("SH104", message, where=fault.path, fix=fix)


def _missing_kind(fault: FieldProblem) -> ShoalError:
    names = schema.sections_by_kind(schema.union_members(fault.expected_type))
    fix = f"Add `kind:` with one of {', '.join(names)}."
    return error("SH104", f"`{fault.path}` has no `kind`", where=f"{fault.path}.kind", fix=fix)


def _unknown_kind(fault: FieldProblem) -> ShoalError:
    names, word = schema.sections_by_kind(schema.union_members(fault.expected_type)), str(fault.context["tag"])
    message = f"`{fault.path}` has no kind '{word}'"
    return error("SH106", message, where=f"{fault.path}.kind", fix=did_you_mean(word, names))


def _invalid_choice(fault: FieldProblem) -> ShoalError:
    allowed = list(map(str, schema.literal_values(fault.expected_type)))
    message = f"{schema.describe_value(fault.value)} is not among the choices"
    return error("SH106", message, where=fault.path, fix=did_you_mean(str(fault.value), allowed))


def _wrong_type(place: str, kind: Any, value: Any) -> ShoalError:
    wanted = " or ".join(map(schema.describe_type, kind)) if isinstance(kind, list) else schema.describe_type(kind)
    fix = f"Write {wanted}."
    if isinstance(value, bool | int | float) and str in map(schema.strip_annotated, schema.union_members(kind)):
        fix = "Put the text in quotes."
    return error("SH105", f"expected {wanted}, found {schema.describe_value(value)}", where=place, fix=fix)


def _out_of_range(fault: FieldProblem) -> ShoalError:
    """A value outside the bounds; the description of the type names them."""
    code = "section_too_short" if fault.code == "too_short" and isinstance(fault.value, dict) else fault.code
    wanted = _BOUND_WORDS.get(code, schema.describe_type(fault.expected_type)).format(**fault.context)
    message = f"expected {wanted}, found {schema.describe_value(fault.value)}"
    return error("SH106", message, where=fault.path, fix=f"Write {wanted}.")


def _from_own_validator(fault: FieldProblem) -> ShoalError:
    """One of Shoal's validators refused the value. Its message starts with "write …" or describes the problem."""
    words = str(fault.context["error"])
    if isinstance(fault.value, dict):
        place = _first_named_field(words, fault)
        return error("SH107", words, where=place, fix=f"Change `{place}`.")
    if words.startswith("write "):
        message = f"{schema.describe_value(fault.value)} is not allowed here"
        return error("SH106", message, where=fault.path, fix=f"W{words[1:]}.")
    return error("SH106", words, where=fault.path, fix=f"Change `{fault.path}`.")


def _first_named_field(words: str, fault: FieldProblem) -> str:
    """The first field of the section that the message mentions, or the section."""
    fields = {
        f
        for m in schema.union_members(fault.expected_type)
        if schema.is_section(m)
        for f in schema.strip_annotated(m).model_fields
    }
    named = next((word for word in re.findall(r"\w+", words) if word in fields), "")
    return f"{fault.path}.{named}".strip(".") if named else fault.path


_BOUND_WORDS = {
    "string_too_short": "text with at least {min_length} character(s)",
    "string_too_long": "text with at most {max_length} character(s)",
    "too_short": "a list of at least {min_length}",
    "section_too_short": "a section with at least {min_length} line(s)",
    "too_long": "a list of at most {max_length}",
    "finite_number": "a finite number",
    "string_pattern_mismatch": "text that matches {pattern}",
}

_HANDLERS = (
    (("extra_forbidden",), _unknown_field),
    (("missing",), _missing_field),
    (("union_tag_not_found",), _missing_kind),
    (("union_tag_invalid",), _unknown_kind),
    (("literal_error",), _invalid_choice),
    (("value_error", "assertion_error"), _from_own_validator),
)
