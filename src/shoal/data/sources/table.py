"""Columns of a table to inputs and target: the common code of csv and Parquet."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shoal.data.source import Array
from shoal.errors import did_you_mean, error
from shoal.spec.data import CsvSourceConfig, ParquetSourceConfig

ColumnKind = Literal["int", "float", "list", "text", "other", "empty"]
TableSpec = CsvSourceConfig | ParquetSourceConfig
MAX_CLASSES = 1 << 16

_NUMERIC: tuple[ColumnKind, ...] = ("int", "float", "list")
_BOOLEAN = re.compile(r"true|false", re.IGNORECASE)
_NUMBER_PATTERNS = {
    pa.int64(): r"^-?\d{1,18}$",
    pa.float64(): r"(?i)^-?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|inf|infinity)$",
}


@dataclass(frozen=True)
class ColumnLayout:
    """The columns for inputs and target. `classes` is set once the values have been read."""

    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    target_type: Literal["int", "float", "class", "none"]
    stacked: bool
    tokens: bool = False
    classes: tuple[Any, ...] | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.inputs, *self.targets)))

    def with_classes(self, classes: tuple[Any, ...]) -> ColumnLayout:
        if len(classes) > MAX_CLASSES:
            raise error("SH310", f"the target '{self.targets[0]}' has {len(classes)} different values",
                        fix="Name a column of classes, or set target_as: number.")  # fmt: skip
        return replace(self, classes=classes)


@dataclass(frozen=True)
class ConvertedRows:
    """Rows of a table as arrays; `bad` marks the rows that cannot be used."""

    inputs: Array
    target: Array | None
    bad_rows: Array

    def good_rows(self) -> ConvertedRows:
        if not self.bad_rows.any():
            return self
        keep = ~self.bad_rows
        return ConvertedRows(self.inputs[keep], None if self.target is None else self.target[keep], self.bad_rows)


# ---- choosing columns ----


def choose_columns(
    spec: TableSpec, kinds: Mapping[str, ColumnKind], *, token_columns: Iterable[str] = (), where: str
) -> ColumnLayout:
    """The layout for a spec and columns of these kinds. `token_columns` are lists of integers."""
    targets = _names(spec.target)
    if spec.inputs is None:
        inputs = tuple(name for name, kind in kinds.items() if kind in _NUMERIC and name not in targets)
    else:
        inputs = _names(spec.inputs)
    for name in (*inputs, *targets):
        if name not in kinds:
            raise error("SH303", f"no column '{name}'", where=where, fix=did_you_mean(name, kinds))
    for name in inputs:
        if kinds[name] in ("text", "other"):
            raise error("SH310", f"the input '{name}' does not hold numbers", where=where)
    if not inputs:
        raise error("SH310", "no column of numbers for the inputs", where=where)
    return ColumnLayout(
        inputs,
        targets,
        _target_type(spec, [kinds[name] for name in targets], where),
        stacked=isinstance(spec.target, list),
        tokens=len(inputs) == 1 and inputs[0] in set(token_columns),
    )


def _names(columns: str | list[str] | None) -> tuple[str, ...]:
    return () if columns is None else (columns,) if isinstance(columns, str) else tuple(columns)


def _target_type(spec: TableSpec, kinds: list[ColumnKind], where: str) -> Literal["int", "float", "class", "none"]:
    if not kinds:
        return "none"
    words = any(kind not in ("int", "float", "empty") for kind in kinds)
    if (words or spec.target_as == "class") and (len(kinds) > 1 or "list" in kinds):
        raise error("SH310", f"the targets {spec.target} must all be columns of numbers", where=where)
    if words and spec.target_as == "number":
        raise error("SH310", f"the target '{spec.target}' does not hold numbers", where=where)
    if words or spec.target_as == "class":
        return "class"
    return "int" if spec.target_as == "auto" and all(kind == "int" for kind in kinds) else "float"


def distinct_values(columns: Iterable[pa.Array]) -> tuple[Any, ...]:
    """The distinct values of a column, sorted: numbers by value, texts alphabetically."""
    found: set[Any] = set()
    for column in columns:
        found.update(value for value in pc.unique(to_plain_array(column)).to_pylist() if value is not None)
        if len(found) > MAX_CLASSES:
            break
    try:
        return tuple(sorted(found, key=float))
    except ValueError:
        return tuple(sorted(found, key=str))


# ---- converting values ----


def convert(table: pa.Table | pa.RecordBatch, layout: ColumnLayout) -> ConvertedRows:
    """Inputs and target of some rows. A row with a missing, unreadable or non-finite value is bad."""
    inputs = _convert_inputs(table, layout)
    bad = np.zeros(table.num_rows, dtype=bool)
    if inputs.dtype.kind == "f":
        bad |= ~np.isfinite(inputs).all(axis=1)
    target, lost = _convert_target(table, layout)
    return ConvertedRows(inputs, target, bad | lost)


def _convert_inputs(table: pa.Table | pa.RecordBatch, layout: ColumnLayout) -> Array:
    if layout.tokens:
        return to_matrix(to_plain_array(table.column(layout.inputs[0])), np.dtype(np.int64), layout.inputs[0])
    columns = [to_plain_array(table.column(name)) for name in layout.inputs]
    if any(is_list(column.type) for column in columns):
        parts = [
            to_matrix(column, np.dtype(np.float32), name) if is_list(column.type) else to_float32(column)[:, None]
            for name, column in zip(layout.inputs, columns, strict=True)
        ]
        return np.concatenate(parts, axis=1)
    out = np.empty((table.num_rows, len(columns)), dtype=np.float32)
    for i, column in enumerate(columns):
        out[:, i] = to_float32(column)
    return out


def _convert_target(table: pa.Table | pa.RecordBatch, layout: ColumnLayout) -> tuple[Array | None, Array]:
    """The target, and a mask of the rows without one."""
    nothing = np.zeros(table.num_rows, dtype=bool)
    if layout.target_type == "none":
        return None, nothing
    columns = [to_plain_array(table.column(name)) for name in layout.targets]
    if layout.target_type == "float":
        stack = np.stack([to_float32(column) for column in columns], axis=1)
        lost = ~np.isfinite(stack).all(axis=1)
    else:
        numbered = [_to_integers(column, layout) for column in columns]
        lost = np.any([column.is_null().to_numpy(zero_copy_only=False) for column in numbered], axis=0)
        stack = np.stack([column.fill_null(0).to_numpy() for column in numbered], axis=1)
    return (stack if layout.stacked else np.ascontiguousarray(stack[:, 0])), lost


def _to_integers(column: pa.Array, layout: ColumnLayout) -> pa.Array:
    if layout.target_type == "class":
        known = pa.array(list(layout.classes or ()), type=column.type)
        return pc.index_in(column, value_set=known, skip_nulls=True).cast(pa.int64())
    return _parse_numbers(column, pa.int64()) if _is_text(column.type) else column.cast(pa.int64())


def to_float32(column: pa.Array) -> Array:
    """The column as float32, with NaN for unreadable values."""
    if _is_text(column.type):
        column = _parse_numbers(column, pa.float64())
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    return np.asarray(column.cast(pa.float32(), safe=False).to_numpy(zero_copy_only=False))


def to_matrix(column: pa.Array, dtype: np.dtype[Any], name: str) -> Array:
    """A column of lists of equal length as a matrix."""
    lengths = pc.unique(pc.list_value_length(column)).to_pylist()
    if len(lengths) > 1 or None in lengths:
        raise error("SH306", f"the lists in column '{name}' have different lengths: {sorted(map(str, lengths))[:5]}")
    flat = to_plain_array(column.flatten())
    if flat.null_count and dtype.kind != "f":
        raise error("SH305", f"a list in column '{name}' has a missing value")
    values = to_float32(flat) if dtype.kind == "f" else flat.cast(pa.int64()).to_numpy()
    return values.reshape(len(column), -1)


def to_plain_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """One array without chunks and dictionaries."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column


def _parse_numbers(words: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Texts as numbers, null for texts that are not numbers; `true` and `false` are 1 and 0."""
    try:
        return words.cast(wanted)
    except pa.ArrowInvalid:
        tidy = pc.replace_substring_regex(pc.utf8_trim_whitespace(words), r"^\+", "")
        lower = pc.utf8_lower(tidy)
        tidy = pc.if_else(pc.equal(lower, "true"), "1", pc.if_else(pc.equal(lower, "false"), "0", tidy))
        readable = pc.match_substring_regex(tidy, _NUMBER_PATTERNS[wanted])
        return pc.if_else(readable, tidy, pa.scalar(None, tidy.type)).cast(wanted)


def count_numbers(words: pa.Array) -> tuple[int, int]:
    """How many of these texts are numbers, and how many are integers."""
    numbers, whole = _parse_numbers(words, pa.float64()), _parse_numbers(words, pa.int64())
    return len(numbers) - numbers.null_count, len(whole) - whole.null_count


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def to_numpy(column: pa.Array | pa.ChunkedArray) -> Array:
    """Any column as a numpy array: numbers, times as datetime64, texts as str."""
    column = to_plain_array(column)
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    if _is_text(column.type):
        return np.array(column.fill_null("").to_pylist(), dtype=str)
    if pa.types.is_date(column.type):
        column = column.cast(pa.timestamp("ms"))
    return np.asarray(column.to_numpy(zero_copy_only=False))


# ---- messages for bad rows ----


def explain_bad_row(table: pa.Table | pa.RecordBatch, row: int, layout: ColumnLayout) -> tuple[str, str]:
    """The code and the message for a bad row. Slow, and called once."""
    for name in layout.columns:
        value = table.column(name)[row].as_py()
        if value is None:
            return "SH305", f"column '{name}' has no value"
        numbered = name in layout.targets and layout.target_type == "class"
        if numbered and value not in (layout.classes or ()):
            return "SH310", f"column '{name}': the training data has no class {value!r}"
        if not numbered and not isinstance(value, list):
            fault = _value_problem(value, name)
            if fault:
                return fault
    return "SH305", "a value is missing, not a number (NaN) or infinite"


def _value_problem(value: Any, name: str) -> tuple[str, str] | None:
    if isinstance(value, str) and _BOOLEAN.fullmatch(value.strip()):
        return None
    try:
        number = float(value)
    except ValueError:
        return "SH304", f"column '{name}': {value!r} is not a number"
    if not abs(number) <= float(np.finfo(np.float32).max):
        return "SH305", f"column '{name}' holds {value}, which is not a finite 32-bit number"
    return None


def column_chunks(tables: Iterable[pa.Table | pa.RecordBatch], name: str) -> Iterator[pa.Array]:
    """One column of every table."""
    return (to_plain_array(table.column(name)) for table in tables)
