"""The filter of the list of runs: words that must all hold. Nothing is evaluated, and no pattern is compiled.

    mlp status=training step>=100 accuracy>0.9 tags=best job!=old

A bare word must occur in the run's name. `name=word` compares texts or numbers; `~` means that the text contains it, or
that of one of the tags.
Names are those of the row's fields, or of its metrics.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.errors import error

MAX_WORDS = 20
NUMBERS = ("step", "steps", "started_t")
TEXTS = ("run", "job", "status", "weights_sha256", "tags", "damage")
FIELDS = (*NUMBERS, *TEXTS)
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge, "<=": operator.le, "!=": operator.ne, "=": operator.eq, ">": operator.gt, "<": operator.lt,
}  # fmt: skip


@dataclass(frozen=True)
class Condition:
    name: str
    sign: str
    value: str

    def holds(self, row: Mapping[str, Any]) -> bool:
        found = _value(row, self.name)
        if self.sign == "~":
            texts = found if isinstance(found, list) else [str(found)]
            return any(self.value.casefold() in text.casefold() for text in texts)
        if isinstance(found, list):
            return (self.value in found) is (self.sign != "!=")
        if isinstance(found, str) or found is None:
            return self.sign in ("=", "!=") and _COMPARE[self.sign]("" if found is None else found, self.value)
        try:
            return _COMPARE[self.sign](found, float(self.value))
        except ValueError:
            return False


def parse_filter(text: str) -> list[Condition]:
    """SH609 if a word is not understood."""
    words = text.split()
    if len(words) > MAX_WORDS:
        raise error("SH609", f"a filter has at most {MAX_WORDS} words", where="where")
    return [_condition(word) for word in words]


def _condition(word: str) -> Condition:
    signs = [(word.find(sign), -len(sign), sign) for sign in (*_COMPARE, "~") if word.find(sign) > 0]
    if not signs:
        return Condition("run", "~", word)
    at, _, sign = min(signs)
    name, value = word[:at], word[at + len(sign) :]
    if not value:
        raise error(
            "SH609", f"'{word[:50]}' has no value", where="where", fix="Write name=value, name>number, name~text."
        )
    if sign in ("<", "<=", ">", ">=") and (name in TEXTS or not _is_number(value)):
        what = f"'{name[:50]}' is a text" if name in TEXTS else f"'{value[:50]}' is not a number"
        raise error("SH609", what, where="where", fix=f"Write {name[:50]}{'~text' if name in TEXTS else sign + '0.9'}.")
    if sign != "~" and name in NUMBERS and not _is_number(value):
        raise error("SH609", f"'{value[:50]}' is not a number", where="where", fix=f"Write {name}{sign}100.")
    return Condition(name, sign, value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _value(row: Mapping[str, Any], name: str) -> Any:
    return row.get(name) if name in FIELDS else row["metrics"].get(name)


def select_rows(rows: Sequence[Mapping[str, Any]], *, where: str, sort: str) -> list[Mapping[str, Any]]:
    """The rows that match, in this order: a field or metric, with `-` before it for the largest first. Rows without
    the value come last. Rows with the same value are in the order of their names, so that pages fit together."""
    conditions = parse_filter(where)
    found = [row for row in sorted(rows, key=_name) if all(one.holds(row) for one in conditions)]
    name, largest_first = sort.removeprefix("-"), sort.startswith("-")
    known = [row for row in found if _sort_key(_value(row, name)) is not None]
    rest = [row for row in found if _sort_key(_value(row, name)) is None]
    return [*sorted(known, key=lambda row: _sort_key(_value(row, name)) or (0, 0.0, ""), reverse=largest_first), *rest]


def _name(row: Mapping[str, Any]) -> str:
    return str(row["run"])


def _sort_key(value: Any) -> tuple[int, float, str] | None:
    """Numbers before texts; NaN and missing values have no place."""
    if isinstance(value, list):
        value = " ".join(value)
    if isinstance(value, str):
        return (1, 0.0, value) if value else None
    return (0, float(value), "") if value is not None and value == value else None
