"""Columns of a table to inputs and target: the common code of csv and Parquet."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from shoal.data.fitted import ColumnEncoder, Fitted
from shoal.data.source import Array, SourceOptions
from shoal.data.sources.encoding import ColumnKind, apply, check_encodings, fit
from shoal.data.sources.values import is_list, is_text, parse_numbers, to_float32, to_float32_rows, to_plain_array
from shoal.errors import did_you_mean, error
from shoal.spec.sources.config import TableConfig

MAX_CLASSES = 1 << 16

_NUMERIC: tuple[ColumnKind, ...] = ("int", "float", "list")
_FIXES: dict[ColumnKind, str] = {
    "text": "Write `encode: {{{name}: onehot}}` (or number, or calendar for times) in data.source, or leave it out.",
    "time": "Write `encode: {{{name}: calendar}}` (or standard) in data.source, or leave it out.",
    "other": "Leave it out of the inputs.",
}
_ROW_NUMBERS = ("", "unnamed: 0", "__index_level_0__", "index", "id")
"""Names that programs such as pandas give to the numbers of rows."""
_BOOLEAN = re.compile(r"true|false", re.IGNORECASE)


@dataclass(frozen=True)
class ColumnLayout:
    """The columns for inputs and target. `classes` is set once the values have been read."""

    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    target_type: Literal["int", "float", "class", "none"]
    stacked: bool
    tokens: bool = False
    classes: tuple[Any, ...] | None = None
    encoders: Mapping[str, ColumnEncoder] = field(default_factory=dict)

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
    spec: TableConfig,
    kinds: Mapping[str, ColumnKind],
    *,
    not_inputs: Iterable[str] = (),
    trained: tuple[str, ...] | None = None,
    token_columns: Iterable[str] = (),
    where: str,
) -> ColumnLayout:
    """The layout for a spec and columns of these kinds. `trained` are the inputs of the training data, if this is other
    data. `token_columns` are lists of integers."""
    targets = _names(spec.target)
    encoded = spec.encode or {}
    check_encodings(spec, kinds, where=where)
    if spec.inputs is None and trained is not None:
        inputs = trained
    elif spec.inputs is None:
        others = {*targets, *not_inputs}
        usable = [name for name, kind in kinds.items() if kind in _NUMERIC or name in encoded]
        inputs = tuple(name for name in usable if name not in others)
    else:
        inputs = _names(spec.inputs)
    for name in (*inputs, *targets):
        if name not in kinds:
            fix = did_you_mean(name, kinds)
            if any(_is_number(other) for other in kinds):
                fix += " If the first line of a csv names no columns, write `header: false`: they are f0, f1, … then."
            raise error("SH303", f"no column '{name}'", where=where, fix=fix)
    for name in inputs:
        if kinds[name] in _FIXES and name not in encoded:
            fix = _FIXES[kinds[name]].format(name=name)
            raise error("SH310", f"the input '{name}' does not hold numbers", where=where, fix=fix)
    unused = [name for name in (*encoded, *(spec.missing or {})) if name not in inputs]
    if unused:
        raise error("SH833", f"'{unused[0]}' is no input, so nothing is to be encoded", where=where)
    if not inputs:
        named = [name for name in kinds if name not in targets]
        fix = (
            f"Write `encode: {{{named[0]}: onehot}}` (or number, or calendar for times) in data.source; for texts that "
            "a tokenizer reads use `kind: huggingface`."
        )
        raise error("SH310", "no column of numbers for the inputs", where=where, fix=fix if named else "")
    return ColumnLayout(
        inputs,
        targets,
        _target_type(spec, [kinds[name] for name in targets], where),
        stacked=isinstance(spec.target, list),
        tokens=len(inputs) == 1 and inputs[0] in set(token_columns),
    )


def tell_left_out(spec: TableConfig, kinds: Mapping[str, ColumnKind], options: SourceOptions) -> None:
    """Name the columns of training data that are no inputs only because they hold no numbers."""
    if spec.inputs is not None or options.fitted is not None:
        return
    others = {*_names(spec.target), *options.not_inputs, *(spec.encode or {})}
    left_out = [name for name, kind in kinds.items() if kind in _FIXES and name not in others]
    if left_out:
        options.notify(
            f"{spec.path}: not among the inputs, because they hold no numbers: {', '.join(left_out)}; `encode` in "
            "data.source makes inputs of them, and `inputs` names the columns to use"
        )
    numbers = [name for name, kind in kinds.items() if kind == "int" and name.lower() in _ROW_NUMBERS]
    if found := [name for name in numbers if name not in others]:
        options.notify(
            f"{spec.path}: '{found[0]}' is among the inputs, and its name is that of a number of each row, which says "
            "nothing of new samples; `inputs` in data.source names the columns to use"
        )


def fit_layout(
    layout: ColumnLayout,
    spec: TableConfig,
    options: SourceOptions,
    *,
    read: Callable[[str], Iterable[pa.Array]],
) -> ColumnLayout:
    """The layout with the numbers of classes and the encoders of columns: those of the training data, or fitted to all
    values of a column, which `read` gives."""
    fitted = options.fitted
    named = {**(spec.encode or {}), **(spec.missing or {})}
    encoders = {
        name: fitted.encoders[name]
        if fitted is not None and name in fitted.encoders
        else fit(
            read(name),
            how=(spec.encode or {}).get(name),
            missing=(spec.missing or {}).get(name),
            name=name,
            where=spec.path,
        )
        for name in layout.inputs
        if name in named
    }
    layout = replace(layout, encoders=encoders)
    if layout.target_type != "class":
        return layout
    return layout.with_classes(options.classes or distinct_values(read(layout.targets[0])))


def saved_layout(layout: ColumnLayout, fitted: Fitted) -> ColumnLayout:
    """The layout with what was fitted when it was written to the cache."""
    layout = replace(layout, encoders=fitted.encoders)
    return layout if fitted.classes is None else layout.with_classes(fitted.classes)


def _names(columns: str | list[str] | None) -> tuple[str, ...]:
    return () if columns is None else (columns,) if isinstance(columns, str) else tuple(columns)


def _target_type(spec: TableConfig, kinds: list[ColumnKind], where: str) -> Literal["int", "float", "class", "none"]:
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
    # The sum is finite if all values are; it needs no array of its own. (A finite value may overflow it.)
    if inputs.dtype.kind == "f" and not math.isfinite(torch.from_numpy(inputs).sum()):
        bad |= ~np.isfinite(inputs).all(axis=1)
    target, lost = _convert_target(table, layout)
    return ConvertedRows(inputs, target, bad | lost)


def _convert_inputs(table: pa.Table | pa.RecordBatch, layout: ColumnLayout) -> Array:
    if layout.tokens:
        return to_matrix(to_plain_array(table.column(layout.inputs[0])), np.dtype(np.int64), layout.inputs[0])
    columns = [to_plain_array(table.column(name)) for name in layout.inputs]
    if not columns:
        return np.empty((table.num_rows, 0), dtype=np.float32)
    if layout.encoders or any(is_list(column.type) for column in columns):
        return np.concatenate(
            [_input_part(column, name, layout) for name, column in zip(layout.inputs, columns, strict=True)], axis=1
        )
    # torch transposes in tiles; numpy would write one value here and the next one a row further.
    return torch.from_numpy(to_float32_rows(columns)).t().contiguous().numpy()


def _input_part(column: pa.Array, name: str, layout: ColumnLayout) -> Array:
    if name in layout.encoders:
        return apply(column, layout.encoders[name])
    return to_matrix(column, np.dtype(np.float32), name) if is_list(column.type) else to_float32(column)[:, None]


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
    return parse_numbers(column, pa.int64()) if is_text(column.type) else column.cast(pa.int64())


def to_matrix(column: pa.Array, dtype: np.dtype[Any], name: str) -> Array:
    """A column of lists of equal length as a matrix."""
    lengths = pc.unique(pc.list_value_length(column)).to_pylist()
    if len(lengths) > 1 or None in lengths:
        if None in lengths:
            raise error("SH305", f"column '{name}' has rows without a list")
        raise error("SH306", f"the lists in column '{name}' have different lengths: {sorted(map(str, lengths))[:5]}")
    flat = to_plain_array(column.flatten())
    if flat.null_count and dtype.kind != "f":
        raise error("SH305", f"a list in column '{name}' has a missing value")
    values = to_float32(flat) if dtype.kind == "f" else flat.cast(pa.int64()).to_numpy()
    return values.reshape(len(column), -1)


# ---- messages for bad rows ----


def explain_bad_row(table: pa.Table | pa.RecordBatch, row: int, layout: ColumnLayout) -> tuple[str, str, str]:
    """The code, the message and the fix (or the code's own) for a bad row. Slow, and called once."""
    for name in layout.columns:
        value = table.column(name)[row].as_py()
        encoder = layout.encoders.get(name)
        if value is None and encoder is not None and encoder.missing is not None:
            continue
        if value is None:
            known = "unknown" if encoder is not None and encoder.how in ("onehot", "number") else "mean"
            fix = f"Write `missing: {{{name}: {known}}}` in data.source, fix the data, or set data.on_bad_row: skip."
            return "SH305", f"column '{name}' has no value", fix if name in layout.inputs else ""
        numbered = name in layout.targets and layout.target_type == "class"
        if numbered and value not in (layout.classes or ()):
            return "SH310", f"column '{name}': the training data has no class {value!r}", ""
        fault = None
        if encoder is not None:
            fault = _encoding_problem(table, row, name, encoder)
        elif isinstance(value, list):
            fault = next(
                (("SH305", f"a list in column '{name}' holds {v}", "") for v in value if not _is_number(v)), None
            )
        elif not numbered:
            fault = _value_problem(value, name, is_target=name in layout.targets)
        if fault:
            return fault
    return "SH305", "a value is missing, not a number (NaN) or infinite", ""


def _encoding_problem(
    table: pa.Table | pa.RecordBatch, row: int, name: str, encoder: ColumnEncoder
) -> tuple[str, str, str] | None:
    one = to_plain_array(table.column(name).slice(row, 1))
    if np.isfinite(apply(one, encoder)).all():
        return None
    if encoder.how == "plain":
        return _value_problem(one[0].as_py(), name, is_target=False)
    message = f"column '{name}': {one[0].as_py()!r} cannot be encoded as '{encoder.how}'"
    iso = "Write times as 2024-03-31 or 2024-03-31 10:00:00 (ISO 8601), or set data.on_bad_row: skip."
    return "SH304", message, iso if encoder.how == "calendar" else ""


def _value_problem(value: Any, name: str, *, is_target: bool) -> tuple[str, str, str] | None:
    if isinstance(value, str) and _BOOLEAN.fullmatch(value.strip()):
        return None
    try:
        number = float(value)
    except ValueError:
        message = f"column '{name}': {value!r} is not a number"
        if is_target:
            return "SH304", message, "If it names a class, write `target_as: class` in data.source; or fix the row."
        gap = f"`null_values: ['{value}']` and `missing: {{{name}: mean}}`"
        fix = f"If it stands for no value, write {gap} in data.source. Or fix the row, or set data.on_bad_row: skip."
        return "SH304", message, fix
    if not abs(number) <= float(np.finfo(np.float32).max):
        return "SH305", f"column '{name}' holds {value}, which is not a finite 32-bit number", ""
    return None


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def column_chunks(tables: Iterable[pa.Table | pa.RecordBatch], name: str) -> Iterator[pa.Array]:
    """One column of every table."""
    return (to_plain_array(table.column(name)) for table in tables)
