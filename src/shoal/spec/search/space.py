"""The space of a search as typed dimensions, from the plain data of the job file.

A key is a path that `--set` knows, or several of them ("loss, epochs") whose values belong together. A value is a range
`{low, high}`, a list of choices, or `{choose: [...]}`. Inside a choice that is a section, ranges and `{choose: ...}`
stand for values that exist only where that choice is taken; a plain list there is just a list.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import ShoalError, error

_RANGE_FIELDS = {"low", "high", "log", "step"}
GUESS_LOG_FROM = 100


@dataclass(frozen=True)
class Range:
    """Numbers from low to high, both included; `whole` ones, or those at a distance of `step`."""

    low: float
    high: float
    log: bool = False
    step: float | None = None
    whole: bool = False


@dataclass(frozen=True)
class Option:
    """One choice: plain data, and the dimensions at places inside it, which exist only here."""

    value: Any
    nested: tuple[tuple[tuple[str | int, ...], Range | Choice], ...] = ()


@dataclass(frozen=True)
class Choice:
    """One of several options; `ordered` if they are numbers that grow."""

    options: tuple[Option, ...]
    ordered: bool = False


@dataclass(frozen=True)
class Dimension:
    """A key of the space: the paths that it sets, and their values."""

    key: str
    paths: tuple[str, ...]
    values: Range | Choice


@dataclass
class ParsedSpace:
    """The dimensions in the order of the job file, and the errors, each at its field."""

    dimensions: list[Dimension] = field(default_factory=list)
    problems: list[ShoalError] = field(default_factory=list)


def parse_space(space: Mapping[str, Any]) -> ParsedSpace:
    """All dimensions and all errors. `where` of an error is the field below `search`."""
    parsed = ParsedSpace()
    for key, value in space.items():
        place = f"search.space.{key}"
        try:
            paths = _paths(key, place)
            parsed.dimensions.append(Dimension(key, paths, _values(value, paths, place)))
        except ShoalError as problem:
            parsed.problems.append(problem)
    return parsed


def _paths(key: str, place: str) -> tuple[str, ...]:
    paths = tuple(path.strip() for path in key.split(","))
    if any(not part.strip() for path in paths for part in path.split(".")):
        fix = 'Write the path of a field, such as optimizer.args.lr, or tied ones: "loss, epochs".'
        raise error("SH106", f"'{key}' is not a path of fields", where=place, fix=fix)
    return paths


def _values(value: Any, paths: Sequence[str], place: str) -> Range | Choice:
    if len(paths) > 1:
        return _tied(value, len(paths), place)
    made = range_or_choice(value, place)
    if made is None and isinstance(value, list):
        made = _choice(value, place)
    if made is None:
        fix = "Write {low: 0.1, high: 10}, or a list of choices. A single value belongs into the job itself."
        raise error("SH105", f"expected a range or a list, found {value!r}", where=place, fix=fix)
    return made


def _tied(value: Any, width: int, place: str) -> Choice:
    rows = value.get("choose") if isinstance(value, dict) and set(value) == {"choose"} else value
    if not isinstance(rows, list) or any(not isinstance(row, list) or len(row) != width for row in rows):
        fix = f"Write a list of choices; each is a list of {width} values, one per field."
        raise error("SH105", f"{width} tied fields need {width} values per choice", where=place, fix=fix)
    return _choice(rows, place)


def range_or_choice(value: Any, place: str = "search.space") -> Range | Choice | None:
    """A range or `{choose: ...}`; None if the value is neither."""
    if not isinstance(value, dict):
        return None
    if "low" in value or "high" in value:
        return _range(value, place)
    if set(value) == {"choose"}:
        if not isinstance(value["choose"], list):
            raise error("SH105", "`choose` needs a list of choices", where=f"{place}.choose")
        return _choice(value["choose"], place)
    return None


def _choice(values: Sequence[Any], place: str) -> Choice:
    if not values:
        raise error("SH106", "the list of choices is empty", where=place, fix="Write at least one choice.")
    options = tuple(_option(value, f"{place}.{i}") for i, value in enumerate(values))
    if any(value == other and type(value) is type(other) for i, value in enumerate(values) for other in values[:i]):
        raise error("SH106", "a choice is in the list twice", where=place, fix="Write each choice once.")
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    ordered = len(numbers) == len(values) > 2 and all(a < b for a, b in itertools.pairwise(numbers))
    return Choice(options, ordered)


def _option(value: Any, place: str) -> Option:
    return Option(value, tuple(_nested(value, (), place)))


def _nested(
    value: Any, at: tuple[str | int, ...], place: str
) -> Iterator[tuple[tuple[str | int, ...], Range | Choice]]:
    """The ranges and choices inside an option."""
    parts: Any = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for key, part in parts:
        found = range_or_choice(part, f"{place}.{key}")
        if found is not None:
            yield (*at, key), found
        else:
            yield from _nested(part, (*at, key), f"{place}.{key}")


def _range(value: Mapping[str, Any], place: str) -> Range:
    unknown = sorted(set(map(str, value)) - _RANGE_FIELDS)
    if unknown:
        fix = "A range has `low`, `high`, `log` and `step`."
        raise error("SH103", f"a range has no '{unknown[0]}'", where=f"{place}.{unknown[0]}", fix=fix)
    low, high = _number(value, "low", place), _number(value, "high", place)
    if low >= high:
        raise error("SH106", f"the range from {low} to {high} is empty", where=f"{place}.high", fix="Write low < high.")
    whole = isinstance(low, int) and isinstance(high, int)
    step = _step(value, low, high, place)
    if step is not None:
        whole = whole and isinstance(step, int)
    return Range(low, high, _log(value, low, high, step, place), step, whole)


def _number(value: Mapping[str, Any], name: str, place: str) -> int | float:
    if name not in value:
        raise error("SH104", f"the range has no `{name}`", where=place, fix=f"Add `{name}`.")
    number = value[name]
    if isinstance(number, bool) or not isinstance(number, int | float) or not _is_finite(number):
        found = "one that is too large" if type(number) is int else repr(number)
        raise error("SH105", f"expected a number, found {found}", where=f"{place}.{name}")
    return number


def _is_finite(number: int | float) -> bool:
    """Also for whole numbers that are larger than any float."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def _step(value: Mapping[str, Any], low: float, high: float, place: str) -> int | float | None:
    if value.get("step") is None:
        return None
    step = _number(value, "step", place)
    if not 0 < step <= high - low:
        fix = f"Write a number above 0 and at most {high - low:g}."
        raise error("SH106", f"a step of {step} does not fit the range", where=f"{place}.step", fix=fix)
    return step


def _log(value: Mapping[str, Any], low: float, high: float, step: float | None, place: str) -> bool:
    asked = value.get("log")
    if asked is None:
        return step is None and low > 0 and high / low >= GUESS_LOG_FROM
    if not isinstance(asked, bool):
        raise error("SH105", f"expected true or false, found {asked!r}", where=f"{place}.log")
    if asked and low <= 0:
        message = f"a logarithmic range cannot begin at {low}"
        raise error("SH107", message, where=f"{place}.log", fix="Write `low` above 0, or `log: false`.")
    if asked and step is not None:
        message = "a range has a `step` or is logarithmic, not both"
        raise error("SH107", message, where=f"{place}.step", fix="Remove `step` or `log`.")
    return asked
