"""Some rows of a table: gradients that are added up, or what a server holds of them; and how they travel."""

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
    """By rising key, each once: so many floats for each key."""

    keys: Keys
    values: Floats

    def __len__(self) -> int:
        return len(self.keys)

    def in_chunks(self, first: int, last: int) -> SparseRows:
        """Those of the chunks [first, last); no copies."""
        begin, end = np.searchsorted(self.keys, [first_key(first), first_key(last)])
        return SparseRows(self.keys[begin:end], self.values[begin:end])

    def batches(self, max_rows: int) -> Iterator[SparseRows]:
        """At most so many at a time."""
        for begin in range(0, len(self), max_rows):
            yield SparseRows(self.keys[begin : begin + max_rows], self.values[begin : begin + max_rows])


def empty_rows(width: int) -> SparseRows:
    return SparseRows(np.empty(0, dtype=np.int64), np.empty((0, width), dtype=np.float32))


def sort_rows(keys: Keys, values: Floats) -> SparseRows:
    """Rows that come in any order."""
    order = np.argsort(keys, kind="stable")
    return SparseRows(keys[order], values[order])


def add_rows(left: SparseRows, right: SparseRows) -> SparseRows:
    """left + right, row by row; a row that only one side has is taken as it is. Neither is changed."""
    if not len(left) or not len(right):
        return left if len(left) else right
    at = np.searchsorted(left.keys, right.keys)
    at[at == len(left)] = 0
    both = left.keys[at] == right.keys
    values = left.values.copy()
    values[at[both]] += right.values[both]
    if both.all():
        return SparseRows(left.keys, values)
    alone = ~both
    return sort_rows(np.concatenate([left.keys, right.keys[alone]]), np.concatenate([values, right.values[alone]]))


def scale_rows(rows: SparseRows, *, count: float | Tensor | None = None, value: float | None = None) -> SparseRows:
    """Gradients divided by a count, then held between -value and value."""
    values = rows.values if count is None else rows.values / np.float32(float(count))
    return SparseRows(rows.keys, values if value is None else values.clip(-value, value))


def copy_matching_rows(rows: SparseRows, keys: Keys, out: Floats) -> None:
    """Put the values of those that are there where they are wanted."""
    if len(rows):
        at = np.searchsorted(rows.keys, keys)
        at[at == len(rows)] = 0
        there = rows.keys[at] == keys
        out[there] = rows.values[at[there]]


# ---- on the way ----


class RowBundle(NamedTuple):
    """Rows of a table, and whose or of which kind, where there are several."""

    tag: int
    table: int
    rows: SparseRows


def pack_rows(bundles: Sequence[RowBundle]) -> list[memoryview | bytes]:
    """What is sent; it looks into the rows' memory."""
    parts: list[memoryview | bytes] = []
    for whose, table, rows in bundles:
        if len(rows):
            values = np.ascontiguousarray(rows.values)
            parts += [_HEADER.pack(whose, table, len(rows)), rows.keys.data.cast("B"), values.data.cast("B")]
            if odd := -values.nbytes % _ALIGN:
                parts.append(bytes(odd))
    return parts


def unpack_rows(raw: bytes | bytearray, widths: Sequence[int], *, chunks: tuple[int, int]) -> list[RowBundle]:
    """What was packed, rows of these chunks, where each table has rows of this width. LinkError for anything else."""
    found, rest = [], memoryview(raw)
    while rest:
        if len(rest) < _HEADER.size:
            raise LinkError("sends half a bundle of rows")
        whose, table, count = _HEADER.unpack_from(rest)
        if table >= len(widths) or count > len(rest):
            raise LinkError(f"sends {count} rows of table {table}")
        keys_end = _HEADER.size + 8 * count
        end = keys_end + 4 * widths[table] * count
        stop = end + -end % _ALIGN
        if stop > len(rest):
            raise LinkError("sends fewer rows than it says")
        keys = np.frombuffer(rest[_HEADER.size : keys_end], dtype=np.int64)
        values = np.frombuffer(rest[keys_end:end], dtype=np.float32).reshape(count, widths[table])
        check_keys(keys, chunks)
        found.append(RowBundle(whose, table, SparseRows(keys, values)))
        rest = rest[stop:]
    return found


def check_keys(keys: Keys, chunks: tuple[int, int]) -> None:
    """LinkError unless they rise, and are of these chunks."""
    first, last = chunks
    if len(keys) and (keys[0] < first_key(first) or keys[-1] >= first_key(last) or (keys[1:] <= keys[:-1]).any()):
        raise LinkError("speaks of rows of other chunks, or in no order")


def by_table(bundles: Sequence[RowBundle]) -> Mapping[int, SparseRows]:
    """One bundle for each table at most."""
    found = {bundle.table: bundle.rows for bundle in bundles}
    if len(found) < len(bundles):
        raise LinkError("sends rows of a table twice")
    return found
