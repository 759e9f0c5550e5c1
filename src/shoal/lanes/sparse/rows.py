"""Rows of a sparse table, gradients or values: sums, and their format on the wire."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from shoal.lanes.sparse.keys import Floats, Keys, first_key
from shoal.net.errors import LinkError

_HEADER = struct.Struct("<IIQ")
_ALIGN = 8


@dataclass(frozen=True)
class SparseRows:
    """Rows with unique, ascending keys."""

    keys: Keys
    values: Floats

    def __len__(self) -> int:
        return len(self.keys)

    def in_chunks(self, first: int, last: int) -> SparseRows:
        """The rows of the chunks [first, last), not copied."""
        begin, end = np.searchsorted(self.keys, [first_key(first), first_key(last)])
        return SparseRows(self.keys[begin:end], self.values[begin:end])

    def batches(self, max_rows: int) -> Iterator[SparseRows]:
        """The rows in batches of at most `max_rows`."""
        for begin in range(0, len(self), max_rows):
            yield SparseRows(self.keys[begin : begin + max_rows], self.values[begin : begin + max_rows])


def empty_rows(width: int) -> SparseRows:
    return SparseRows(np.empty(0, dtype=np.int64), np.empty((0, width), dtype=np.float32))


def sort_rows(keys: Keys, values: Floats) -> SparseRows:
    """Rows given in any order."""
    order = np.argsort(keys, kind="stable")
    return SparseRows(keys[order], values[order])


def add_rows(left: SparseRows, right: SparseRows) -> SparseRows:
    """left + right, row by row; a row on one side only is copied. Neither argument is changed."""
    if not len(left) or not len(right):
        return left if len(left) else right
    index = np.searchsorted(left.keys, right.keys)
    index[index == len(left)] = 0
    both = left.keys[index] == right.keys
    values = left.values.copy()
    values[index[both]] += right.values[both]
    if both.all():
        return SparseRows(left.keys, values)
    new = ~both
    return sort_rows(np.concatenate([left.keys, right.keys[new]]), np.concatenate([values, right.values[new]]))


def scale_rows(rows: SparseRows, *, count: float | Tensor | None = None, value: float | None = None) -> SparseRows:
    """Gradients divided by a count, then clipped to -value and value. As for dense gradients, 0 divides by 1."""
    values = rows.values if count is None else rows.values / np.float32(float(count) or 1.0)
    return SparseRows(rows.keys, values if value is None else values.clip(-value, value))


def copy_matching_rows(rows: SparseRows, keys: Keys, out: Floats) -> None:
    """Copy the values of the rows with these keys into `out`; keys without a row are skipped."""
    if len(rows):
        index = np.searchsorted(rows.keys, keys)
        index[index == len(rows)] = 0
        found = rows.keys[index] == keys
        out[found] = rows.values[index[found]]


# ---- wire format ----


class RowBundle(NamedTuple):
    """Rows of a table. `tag` tells bundles of one table apart, by owner or by kind."""

    tag: int
    table: int
    rows: SparseRows


def pack_rows(bundles: Sequence[RowBundle]) -> list[memoryview | bytes]:
    """The bytes to send; they are views of the rows' memory."""
    parts: list[memoryview | bytes] = []
    for tag, table, rows in bundles:
        if len(rows):
            values = np.ascontiguousarray(rows.values)
            parts += [_HEADER.pack(tag, table, len(rows)), rows.keys.data.cast("B"), values.data.cast("B")]
            if padding := -values.nbytes % _ALIGN:
                parts.append(bytes(padding))
    return parts


def unpack_rows(raw: bytes | bytearray, widths: Sequence[int], *, chunks: tuple[int, int]) -> list[RowBundle]:
    """The inverse of `pack_rows`, for rows of these chunks and tables of these widths. LinkError for anything else."""
    found, rest = [], memoryview(raw)
    while rest:
        if len(rest) < _HEADER.size:
            raise LinkError("sent an incomplete bundle of rows")
        tag, table, count = _HEADER.unpack_from(rest)
        if table >= len(widths) or count > len(rest):
            raise LinkError(f"sent {count} rows of table {table}, which cannot be")
        keys_end = _HEADER.size + 8 * count
        end = keys_end + 4 * widths[table] * count
        stop = end + -end % _ALIGN
        if stop > len(rest):
            raise LinkError("sent fewer rows than announced")
        keys = np.frombuffer(rest[_HEADER.size : keys_end], dtype=np.int64)
        values = np.frombuffer(rest[keys_end:end], dtype=np.float32).reshape(count, widths[table])
        check_keys(keys, chunks)
        found.append(RowBundle(tag, table, SparseRows(keys, values)))
        rest = rest[stop:]
    return found


def check_keys(keys: Keys, chunks: tuple[int, int]) -> None:
    """LinkError unless the keys are ascending and belong to these chunks."""
    first, last = chunks
    if len(keys) and (keys[0] < first_key(first) or keys[-1] >= first_key(last) or (keys[1:] <= keys[:-1]).any()):
        raise LinkError("sent rows of other chunks, or unsorted rows")


def by_table(bundles: Sequence[RowBundle]) -> Mapping[int, SparseRows]:
    """Rows by table. LinkError if a table has more than one bundle."""
    found = {bundle.table: bundle.rows for bundle in bundles}
    if len(found) < len(bundles):
        raise LinkError("sent rows of a table twice")
    return found
