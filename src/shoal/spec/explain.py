"""Pydantic's errors as ours: in plain words, with the field as the user wrote it and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from shoal.errors import ShoalError, did_you_mean, error
from shoal.spec import schema
from shoal.spec.base import Ref, Spec

# Words of other tools at the top of a job, and where their meaning stands here.
_ELSEWHERE = {
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
class Fault:
    """One pydantic error, with its place found in the models.

    `place` is the field as the user wrote it, without pydantic's tags of unions; `kind` its type; `section`
    what is around it; `others` the sections that may stand there instead, by kind; `union` the place of the
    plain union (text or a list) that the error came through.
    """

    code: str
    place: str
    kind: Any
    section: Any
    others: Mapping[str, type[Spec]]
    value: Any
    context: Mapping[str, Any]
    union: str | None

    @property
    def field(self) -> str:
        return self.place.rpartition(".")[2]

    @property
    def around(self) -> str:
        return self.place.rpartition(".")[0]


def explain(failure: ValidationError, *, model: type[Spec]) -> list[ShoalError]:
    """Every problem once. `where` of each is the field."""
    faults = [_fault(raw, model) for raw in failure.errors(include_url=False)]
    told = {f.place: _tell(f) for f in reversed(list(_deepest(faults)))}
    return list(reversed(told.values()))


def stray_booleans(data: Mapping[str, Any], *, model: type[Spec]) -> list[ShoalError]:
    """`epochs: yes` is true for YAML and 1 for pydantic; for us it is a mistake."""
    numbers = (int, float)
    return [
        _wrong_type(place, kinds, value)
        for place, kinds, value in schema.leaves(model, dict(data))
        if isinstance(value, bool) and kinds and all(schema.bare(k) in numbers for k in kinds)
    ]


def _fault(raw: Mapping[str, Any], model: type[Spec]) -> Fault:
    """Follow pydantic's location through the models; tags and labels of unions are no part of the place."""
    place: list[str] = []
    kind: Any = model
    section: Any = model
    sections: dict[str, type[Spec]] = {}
    others: Mapping[str, type[Spec]] = {}
    union = None
    for step in raw["loc"]:
        alternatives = schema.members(kind)
        if len(alternatives) > 1:
            sections = schema.kinds(alternatives)
            union = union if sections else ".".join(place)
            kind = sections.get(str(step)) or _labelled(alternatives, str(step))
            continue
        section, kind = alternatives[0], schema.child(alternatives[0], step)
        others, sections = sections, {}
        place.append(str(step))
    return Fault(
        code=raw["type"],
        place=".".join(place),
        kind=kind,
        section=section,
        others=others,
        value=raw["input"],
        context=raw.get("ctx", {}),
        union=union,
    )


def _labelled(alternatives: list[Any], label: str) -> Any:
    """The alternative that pydantic calls `list[str]`, `str`, `constrained-int` and the like."""
    word = label.partition("[")[0].rpartition("-")[2]
    return next((a for a in alternatives if word in str(schema.bare(a)).lower()), Any)


def _deepest(faults: list[Fault]) -> Iterator[Fault]:
    """Of a plain union's faults the one that got furthest, or one for the union as a whole."""
    for fault in faults:
        inside = any(f.union == fault.union and f.place != fault.union for f in faults)
        if fault.union is None or fault.place != fault.union or not inside:
            yield fault


def _tell(fault: Fault) -> ShoalError:
    if fault.union == fault.place:
        return _whole_union(fault)
    for types, tell in _TELLERS:
        if fault.code in types:
            return tell(fault)
    if fault.code.endswith(("_type", "_parsing", "_from_float")):
        is_name = fault.field == "name" and _is_ref(fault.section)
        return _wrong_type(fault.place, fault.section if is_name else fault.kind, fault.value)
    return _out_of_range(fault)


def _is_ref(section: Any) -> bool:
    return schema.is_section(section) and issubclass(schema.bare(section), Ref)


def _whole_union(fault: Fault) -> ShoalError:
    union = schema.child(fault.section, fault.field)
    return _wrong_type(fault.place, union, fault.value)


def _unknown(fault: Fault) -> ShoalError:
    name, section = fault.field, schema.bare(fault.section)
    inside = f" in `{fault.around}`" if fault.around else ""
    fix = did_you_mean(name, section.model_fields)
    if _is_ref(section):
        inside += ", which takes a name and its arguments"
        fix = f"Arguments stand under `args`: {fault.around}.args.{name}. {fix}"
    elif takers := [kind for kind, other in fault.others.items() if name in other.model_fields]:
        fix = f"'{name}' is for kind {', '.join(takers)}. {fix}"
    elif not fault.around and name in _ELSEWHERE:
        fix = f"Write {_ELSEWHERE[name]}."
    return error("SH103", f"unknown field '{name}'{inside}", where=fault.place, fix=fix)


def _missing(fault: Fault) -> ShoalError:
    message = f"the field '{fault.field}' is missing" + (f" in `{fault.around}`" if fault.around else "")
    fix = f"Add `{fault.field}:` with {schema.expected(fault.kind)}."
    return error("SH104", message, where=fault.place, fix=fix)


def _no_kind(fault: Fault) -> ShoalError:
    names = schema.kinds(schema.members(fault.kind))
    fix = f"Add `kind:` with one of {', '.join(names)}."
    return error("SH104", f"`{fault.place}` does not say its kind", where=f"{fault.place}.kind", fix=fix)


def _bad_kind(fault: Fault) -> ShoalError:
    names, word = schema.kinds(schema.members(fault.kind)), str(fault.context["tag"])
    message = f"`{fault.place}` has no kind '{word}'"
    return error("SH106", message, where=f"{fault.place}.kind", fix=did_you_mean(word, names))


def _bad_choice(fault: Fault) -> ShoalError:
    allowed = list(map(str, schema.choices(fault.kind)))
    message = f"{schema.found(fault.value)} is not among the choices"
    return error("SH106", message, where=fault.place, fix=did_you_mean(str(fault.value), allowed))


def _wrong_type(place: str, kind: Any, value: Any) -> ShoalError:
    wanted = " or ".join(map(schema.expected, kind)) if isinstance(kind, list) else schema.expected(kind)
    fix = f"Write {wanted}."
    if isinstance(value, bool | int | float) and str in map(schema.bare, schema.members(kind)):
        fix = "Put the text in quotes."
    return error("SH105", f"expected {wanted}, found {schema.found(value)}", where=place, fix=fix)


def _out_of_range(fault: Fault) -> ShoalError:
    """A bound was broken; the type's own words say which."""
    wanted = _BREACHES.get(fault.code, schema.expected(fault.kind)).format(**fault.context)
    message = f"expected {wanted}, found {schema.found(fault.value)}"
    return error("SH106", message, where=fault.place, fix=f"Write {wanted}.")


def _own_words(fault: Fault) -> ShoalError:
    """A validator of ours refused the value, in words for the user: "write …", or what is the matter."""
    words = str(fault.context["error"])
    if isinstance(fault.value, dict):
        place = _blamed(words, fault)
        return error("SH107", words, where=place, fix=f"Change `{place}`.")
    if words.startswith("write "):
        message = f"{schema.found(fault.value)} is not allowed here"
        return error("SH106", message, where=fault.place, fix=f"W{words[1:]}.")
    return error("SH106", words, where=fault.place, fix=f"Change `{fault.place}`.")


def _blamed(words: str, fault: Fault) -> str:
    """The first field of a section that the words about it name, or the section."""
    fields = {f for m in schema.members(fault.kind) if schema.is_section(m) for f in schema.bare(m).model_fields}
    named = next((word for word in re.findall(r"\w+", words) if word in fields), "")
    return f"{fault.place}.{named}".strip(".") if named else fault.place


_BREACHES = {
    "string_too_short": "text with at least {min_length} character(s)",
    "string_too_long": "text with at most {max_length} character(s)",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "finite_number": "a finite number",
    "string_pattern_mismatch": "text that matches {pattern}",
}

_TELLERS = (
    (("extra_forbidden",), _unknown),
    (("missing",), _missing),
    (("union_tag_not_found",), _no_kind),
    (("union_tag_invalid",), _bad_kind),
    (("literal_error",), _bad_choice),
    (("value_error", "assertion_error"), _own_words),
)
