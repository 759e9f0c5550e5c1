"""Columns of Arrow as numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shoal.data.source import Array

_NUMBER_PATTERNS = {
    pa.int64(): r"^-?\d{1,18}$",
    pa.float64(): r"(?i)^-?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|inf|infinity)$",
}


def to_float32(column: pa.Array) -> Array:
    """The column as float32, with NaN for unreadable values."""
    if is_text(column.type):
        column = parse_numbers(column, pa.float64())
    if pa.types.is_boolean(column.type):
        column = column.cast(pa.uint8())
    if column.type != pa.float32():
        column = column.cast(pa.float32(), safe=False)
    return np.asarray(column.to_numpy(zero_copy_only=False))


def to_float32_rows(columns: Sequence[pa.Array]) -> Array:
    """The columns as the rows of a matrix, as `to_float32` has them."""
    if all(column.type == pa.float32() and not column.null_count for column in columns):
        # One call, in which other threads compute.
        names = [str(number) for number in range(len(columns))]
        tensor = pa.RecordBatch.from_arrays(list(columns), names).to_tensor(row_major=False)
        return np.asarray(tensor.to_numpy()).T
    rows = np.empty((len(columns), len(columns[0])), dtype=np.float32)
    for row, column in zip(rows, columns, strict=True):
        row[:] = to_float32(column)
    return rows


def to_plain_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """One array without chunks and dictionaries."""
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column


def parse_numbers(words: pa.Array, wanted: pa.DataType) -> pa.Array:
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
    numbers, whole = parse_numbers(words, pa.float64()), parse_numbers(words, pa.int64())
    return len(numbers) - numbers.null_count, len(whole) - whole.null_count


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def to_numpy(column: pa.Array | pa.ChunkedArray) -> Array:
    """Any column as a numpy array: numbers, times as datetime64, texts as str."""
    column = to_plain_array(column)
    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    if is_text(column.type):
        return np.array(column.fill_null("").to_pylist(), dtype=str)
    if pa.types.is_date(column.type):
        column = column.cast(pa.timestamp("ms"))
    return np.asarray(column.to_numpy(zero_copy_only=False))
