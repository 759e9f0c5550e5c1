"""Columns of categories, times and numbers with gaps as inputs: fitted on the training data, then applied to any."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from shoal.data.fitted import ColumnEncoder
from shoal.data.source import Array
from shoal.data.sources.values import is_text, parse_numbers, to_plain_array
from shoal.errors import did_you_mean, error
from shoal.spec.sources.config import Encoding, Missing, TableConfig

ColumnKind = Literal["int", "float", "list", "text", "time", "other", "empty"]
MAX_CATEGORIES = 1 << 16
_DAY_S = 86_400.0
_PERIODS_S = (_DAY_S, 7 * _DAY_S, 365.2425 * _DAY_S)
_MONDAY_S = 4 * _DAY_S  # 1970-01-05
_ISO_TIME = r"^\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?)?$"
_ISO_TIME_WITH_ZONE = r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(Z|[+-]\d\d(:?\d\d)?)$"
Numbers = npt.NDArray[np.float64]


def check_encodings(spec: TableConfig, kinds: Mapping[str, ColumnKind], *, where: str) -> None:
    """SH833 for an encoding or a policy of a column that it does not fit."""
    for field, named in (("encode", spec.encode or {}), ("missing", spec.missing or {})):
        for name, how in named.items():
            kind = kinds.get(name)
            if kind is None:
                raise error("SH303", f"{field}: no column '{name}'", where=where, fix=did_you_mean(name, kinds))
            times = kind in ("time", "text")  # texts may be times: whether they are is seen when they are read
            fits = kind != "list" if field == "missing" else _fits(how, kind, times)
            if kind == "other" or not fits:
                raise error("SH833", f"{field}: '{name}' is a column of {_WORDS[kind]}, not for '{how}'", where=where)


_WORDS: dict[ColumnKind, str] = {
    "int": "whole numbers", "float": "numbers", "list": "lists", "text": "texts", "time": "times",
    "other": "values that no encoding takes", "empty": "nothing",
}  # fmt: skip


def _fits(how: object, kind: ColumnKind, times: bool) -> bool:
    match how:
        case "calendar":
            return times
        case "standard":
            return times or kind in ("int", "float")
    return kind not in ("list", "float")


def fit(
    column: Iterable[pa.Array], *, how: Encoding | None, missing: Missing | None, name: str, where: str
) -> ColumnEncoder:
    """What the encoding needs to know of all values of a column."""
    if how in ("onehot", "number"):
        return ColumnEncoder(how=how, missing=missing, categories=_categories(column, name, where))
    mean, deviation = 0.0, 1.0
    if how == "standard" or missing in ("mean", "flag"):
        mean, deviation = _moments(column, name, where)
    return ColumnEncoder(how=how or "plain", missing=missing, mean=mean, deviation=deviation)


def apply(column: pa.Array, encoder: ColumnEncoder) -> Array:
    """The inputs, float32 [rows, width]. A row of NaN has no value, and no policy for that, or one that cannot be
    read."""
    if encoder.how in ("onehot", "number"):
        return _apply_categories(column, encoder)
    numbers = to_numbers(column)
    gaps = np.asarray(column.is_null(nan_is_null=True))
    if encoder.missing is not None:
        numbers = np.where(gaps, encoder.mean if isinstance(encoder.missing, str) else encoder.missing, numbers)
    match encoder.how:
        case "standard":
            parts = [(numbers - encoder.mean) / encoder.deviation]
        case "calendar":
            angles = [2 * np.pi * ((numbers - _MONDAY_S) % period) / period for period in _PERIODS_S]
            parts = [turn(angle) for angle in angles for turn in (np.sin, np.cos)]
        case _:
            parts = [numbers]
    if encoder.missing == "flag":
        parts.append(gaps.astype(np.float64))
    with np.errstate(over="ignore"):
        made: Array = np.stack(parts, axis=1).astype(np.float32)
    return made


def _apply_categories(column: pa.Array, encoder: ColumnEncoder) -> Array:
    out: Array
    known = pa.array(encoder.categories, type=pa.string())
    place = pc.index_in(_to_words(column), value_set=known, skip_nulls=True).fill_null(-1).to_numpy()
    if encoder.how == "number":
        out = (place + 1).astype(np.float32)[:, None]
    else:
        out = np.zeros((len(place), len(encoder.categories)), dtype=np.float32)
        found = np.flatnonzero(place >= 0)
        out[found, place[found]] = 1.0
    if encoder.missing is None:
        out[np.asarray(column.is_null())] = np.nan
    return out


def to_numbers(column: pa.Array) -> Numbers:
    """Numbers as they are, times as seconds since 1970 (UTC), texts as either. NaN where there is none."""
    if pa.types.is_temporal(column.type):
        return _seconds(column)
    if is_text(column.type):
        numbers = parse_numbers(column, pa.float64())
        if numbers.null_count == len(column) > column.null_count:
            return _seconds(column)
        column = numbers
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    return np.asarray(column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))


def _seconds(column: pa.Array) -> Numbers:
    if is_text(column.type):
        words = pc.utf8_trim_whitespace(column)
        plain, zoned = (_matching(words, pattern) for pattern in (_ISO_TIME, _ISO_TIME_WITH_ZONE))
        with_zone = zoned.cast(pa.timestamp("us", tz="UTC")).cast(pa.timestamp("us"))
        column = pc.coalesce(plain.cast(pa.timestamp("us")), with_zone)
    if pa.types.is_time(column.type):
        column = column.cast(pa.time64("us"))
    else:
        column = column.cast(pa.timestamp("us"), safe=False)
    whole = column.cast(pa.int64())
    return np.asarray(whole.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)) / 1e6


def _matching(words: pa.Array, pattern: str) -> pa.Array:
    return pc.if_else(pc.match_substring_regex(words, pattern), words, pa.scalar(None, words.type))


def _to_words(column: pa.Array) -> pa.Array:
    return column.cast(pa.string())


def _categories(column: Iterable[pa.Array], name: str, where: str) -> tuple[str, ...]:
    found: set[str] = set()
    for chunk in column:
        found.update(word for word in pc.unique(_to_words(to_plain_array(chunk))).to_pylist() if word is not None)
        if len(found) > MAX_CATEGORIES:
            message = f"the column '{name}' has more than {MAX_CATEGORIES:,} different values"
            raise error("SH833", message, where=where, fix="Leave it out, or hash it in a transform.")
    try:
        return tuple(sorted(found, key=float))
    except ValueError:
        return tuple(sorted(found))


def _moments(column: Iterable[pa.Array], name: str, where: str) -> tuple[float, float]:
    """Mean and deviation of the values that are there, chunk by chunk (Chan's way: times are large numbers)."""
    count, mean, squares = 0, 0.0, 0.0
    for chunk in column:
        numbers = to_numbers(to_plain_array(chunk))
        numbers = numbers[np.isfinite(numbers)]
        if not len(numbers):
            continue
        own, total = float(numbers.mean()), count + len(numbers)
        apart = own - mean
        squares += float(((numbers - own) ** 2).sum()) + apart * apart * count * len(numbers) / total
        mean, count = mean + apart * len(numbers) / total, total
    if not count:
        raise error("SH833", f"the column '{name}' has no number and no time", where=where)
    deviation = float(np.sqrt(squares / count))
    return mean, deviation if deviation > 0 else 1.0
