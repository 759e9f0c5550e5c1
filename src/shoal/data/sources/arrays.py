"""Samples that are rows of arrays, in memory or memory-mapped."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from shoal.data.batch import Batch
from shoal.data.fitted import ColumnEncoder
from shoal.data.source import Array, DataSource, Ids
from shoal.errors import error

_PAGE_BYTES = 4096
_RELEASE_BYTES = 64 << 20
_SCAN_BYTES = 16 << 20

ConvertRows = Callable[[Tensor], Tensor]


class RowArray(Protocol):
    """One array, row by row."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def take(self, ids: Ids) -> Tensor: ...

    def raw(self) -> Array:
        """The stored array, not converted."""
        ...


class InMemoryRows:
    """Rows in memory. `convert` makes the tensor of a batch, so pixels can be stored as bytes."""

    def __init__(self, array: Array, convert: ConvertRows | None = None) -> None:
        self._tensor = torch.from_numpy(np.require(array, requirements=["C", "W"]))
        self._convert = convert
        self.dtype, self.shape = array.dtype, array.shape

    def take(self, ids: Ids) -> Tensor:
        rows = self._tensor.index_select(0, torch.from_numpy(ids))
        return self._convert(rows) if self._convert else rows

    def raw(self) -> Array:
        return self._tensor.numpy()


class MemoryMappedRows:
    """Memory-mapped rows. Values are checked in `take`, and pages are released from time to time.

    The kernel would reclaim the pages itself, but until then they count as memory of this process, and monitors and
    memory limits would see a job as large as its data.
    """

    def __init__(self, array: np.memmap[Any, Any], where: str, convert: ConvertRows | None = None) -> None:
        self._array = array
        self._where = where
        self._convert = convert
        self._touched_bytes = 0
        self._row_bytes = max(_PAGE_BYTES, array[:1].nbytes)
        self.dtype, self.shape = array.dtype, array.shape

    def take(self, ids: Ids) -> Tensor:
        rows = np.asarray(self._array[ids])
        self._check_finite(rows, ids)
        self._release_pages(len(ids))
        tensor = torch.from_numpy(rows)
        return self._convert(tensor) if self._convert else tensor

    def raw(self) -> Array:
        return self._array

    def _check_finite(self, rows: Array, ids: Ids) -> None:
        if self.dtype.kind == "f" and not np.isfinite(rows).all():
            raise not_finite_error(self._where, int(ids[np.flatnonzero(bad_rows(rows))[0]]))

    def _release_pages(self, rows: int) -> None:
        self._touched_bytes += rows * self._row_bytes
        if self._touched_bytes > _RELEASE_BYTES:
            self._touched_bytes = 0
            pages = getattr(self._array, "_mmap", None)
            if isinstance(pages, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                pages.madvise(mmap.MADV_DONTNEED)


class ArraySource(DataSource):
    """Inputs and target as rows. `lookup` reads other columns on demand."""

    def __init__(
        self,
        inputs: tuple[RowArray, ...],
        target: RowArray | None,
        *,
        good_rows: Ids | None = None,
        skipped_rows: int = 0,
        classes: tuple[Any, ...] | None = None,
        encoders: Mapping[str, ColumnEncoder] | None = None,
        names: tuple[str, ...] = (),
        lookup: Callable[[str], Array] | None = None,
    ) -> None:
        self._inputs = inputs
        self._target = target
        self._good_rows = good_rows
        self._names = names
        self._lookup = lookup
        self._size = inputs[0].shape[0] if good_rows is None else len(good_rows)
        self.in_memory = all(isinstance(rows, InMemoryRows) for rows in (*inputs, target) if rows is not None)
        self.skipped_rows = skipped_rows
        self.classes = classes
        self.encoders = encoders or {}

    def __len__(self) -> int:
        return self._size

    def take(self, ids: Ids) -> Batch:
        if self._good_rows is not None:
            ids = self._good_rows[ids]
        inputs = tuple([rows.take(ids) for rows in self._inputs])
        return Batch(inputs, None if self._target is None else self._target.take(ids), len(ids))

    def sizes(self) -> Array:
        bytes_each = sum(int(np.prod(rows.shape[1:])) * rows.dtype.itemsize for rows in self._inputs)
        return np.full(len(self), bytes_each, dtype=np.int64)

    def targets(self) -> Array:
        if self._target is None:
            raise error("SH303", "the data has no target", fix="Name the target in data.source.target.")
        raw = self._target.raw()
        return np.asarray(raw if self._good_rows is None else raw[self._good_rows])

    def own_columns(self) -> list[str]:
        return list(self._names)

    def own_column(self, name: str) -> Array:
        assert self._lookup is not None
        return self._lookup(name)


def bad_rows(rows: Array) -> Array:
    """A mask of the rows that hold NaN or an infinite value."""
    return np.asarray(~np.isfinite(rows).reshape(len(rows), -1).all(axis=1))


def not_finite_error(where: str, row: int) -> Exception:
    return error("SH305", f"row {row} holds a value that is not a number (NaN) or is infinite", where=where)


def find_good_rows(arrays: Mapping[str, Array], *, skip_bad_rows: bool) -> Array | None:
    """The ids of the good rows if bad rows exist and are skipped; None if all rows are good.

    Scans the arrays chunk by chunk, so mapped arrays may be larger than memory.
    """
    bad = np.zeros(len(next(iter(arrays.values()))), dtype=bool)
    for where, array in arrays.items():
        if array.dtype.kind != "f":
            continue
        for start, rows in _chunks(array):
            found = bad_rows(rows)
            if found.any() and not skip_bad_rows:
                raise not_finite_error(where, start + int(np.flatnonzero(found)[0]))
            bad[start : start + len(rows)] |= found
    if bad.all():
        raise error("SH302", "no good row is left", where=next(iter(arrays)))
    return np.flatnonzero(~bad) if bad.any() else None


def _chunks(array: Array) -> Iterator[tuple[int, Array]]:
    rows = max(1, _SCAN_BYTES // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        yield start, array[start : start + rows]


def check_same_length(lengths: Mapping[str, int]) -> None:
    """SH306 if the arrays differ in length, SH302 if they are empty."""
    (first, rows), *others = lengths.items()
    for name, length in others:
        if length != rows:
            raise error("SH306", f"{first} has {rows} rows, {name} has {length}", where=name)
    if rows == 0:
        raise error("SH302", "no rows", where=first)
