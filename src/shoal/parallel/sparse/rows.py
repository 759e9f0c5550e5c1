"""Some rows of a table: gradients that are added up, or what a server holds of them; and how they travel."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from shoal.parallel.sparse.keys import Floats, Keys, chunk_start
from shoal.wire.handshake import LinkError

_HEAD = struct.Struct("<IIQ")
_ALIGN = 8


@dataclass(frozen=True)
class Rows:
    """By rising key, each once: so many floats for each key."""

    keys: Keys
    values: Floats

    def __len__(self) -> int:
        return len(self.keys)

    def between(self, first: int, last: int) -> Rows:
        """Those of the chunks [first, last); no copies."""
        begin, end = np.searchsorted(self.keys, [chunk_start(first), chunk_start(last)])
        return Rows(self.keys[begin:end], self.values[begin:end])

    def parts(self, most: int) -> Iterator[Rows]:
        """At most so many at a time."""
        for begin in range(0, len(self), most):
            yield Rows(self.keys[begin : begin + most], self.values[begin : begin + most])


def none_of(width: int) -> Rows:
    return Rows(np.empty(0, dtype=np.int64), np.empty((0, width), dtype=np.float32))


def in_order(keys: Keys, values: Floats) -> Rows:
    """Rows that come in any order."""
    order = np.argsort(keys, kind="stable")
    return Rows(keys[order], values[order])


def add(left: Rows, right: Rows) -> Rows:
    """left + right, row by row; a row that only one side has is taken as it is. Neither is changed."""
    if not len(left) or not len(right):
        return left if len(left) else right
    at = np.searchsorted(left.keys, right.keys)
    at[at == len(left)] = 0
    both = left.keys[at] == right.keys
    values = left.values.copy()
    values[at[both]] += right.values[both]
    if both.all():
        return Rows(left.keys, values)
    alone = ~both
    return in_order(np.concatenate([left.keys, right.keys[alone]]), np.concatenate([values, right.values[alone]]))


def scaled(rows: Rows, *, count: float | Tensor | None = None, value: float | None = None) -> Rows:
    """Gradients divided by a count, then held between -value and value."""
    values = rows.values if count is None else rows.values / np.float32(float(count))
    return Rows(rows.keys, values if value is None else values.clip(-value, value))


def look_up(rows: Rows, keys: Keys, into: Floats) -> None:
    """Put the values of those that are there where they are wanted."""
    if len(rows):
        at = np.searchsorted(rows.keys, keys)
        at[at == len(rows)] = 0
        there = rows.keys[at] == keys
        into[there] = rows.values[at[there]]


# ---- on the way ----


class Bundle(NamedTuple):
    """Rows of a table, and whose or of which kind, where there are several."""

    whose: int
    table: int
    rows: Rows


def packed(bundles: Sequence[Bundle]) -> list[memoryview | bytes]:
    """What is sent; it looks into the rows' memory."""
    parts: list[memoryview | bytes] = []
    for whose, table, rows in bundles:
        if len(rows):
            values = np.ascontiguousarray(rows.values)
            parts += [_HEAD.pack(whose, table, len(rows)), rows.keys.data.cast("B"), values.data.cast("B")]
            if odd := -values.nbytes % _ALIGN:
                parts.append(bytes(odd))
    return parts


def unpacked(raw: bytes | bytearray, widths: Sequence[int], *, chunks: tuple[int, int]) -> list[Bundle]:
    """What was packed, rows of these chunks, where each table has rows of this width. LinkError for anything else."""
    found, rest = [], memoryview(raw)
    while rest:
        if len(rest) < _HEAD.size:
            raise LinkError("sends half a bundle of rows")
        whose, table, count = _HEAD.unpack_from(rest)
        if table >= len(widths) or count > len(rest):
            raise LinkError(f"sends {count} rows of table {table}")
        keys_end = _HEAD.size + 8 * count
        end = keys_end + 4 * widths[table] * count
        stop = end + -end % _ALIGN
        if stop > len(rest):
            raise LinkError("sends fewer rows than it says")
        keys = np.frombuffer(rest[_HEAD.size : keys_end], dtype=np.int64)
        values = np.frombuffer(rest[keys_end:end], dtype=np.float32).reshape(count, widths[table])
        check_keys(keys, chunks)
        found.append(Bundle(whose, table, Rows(keys, values)))
        rest = rest[stop:]
    return found


def check_keys(keys: Keys, chunks: tuple[int, int]) -> None:
    """LinkError unless they rise, and are of these chunks."""
    first, last = chunks
    if len(keys) and (keys[0] < chunk_start(first) or keys[-1] >= chunk_start(last) or (keys[1:] <= keys[:-1]).any()):
        raise LinkError("speaks of rows of other chunks, or in no order")


def by_table(bundles: Sequence[Bundle]) -> Mapping[int, Rows]:
    """One bundle for each table at most."""
    found = {bundle.table: bundle.rows for bundle in bundles}
    if len(found) < len(bundles):
        raise LinkError("sends rows of a table twice")
    return found
