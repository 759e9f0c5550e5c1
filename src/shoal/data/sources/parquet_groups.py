"""A Parquet table of any size: samples come from row groups, and the most recently used groups stay decoded."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from shoal.data.batch import Batch
from shoal.data.source import Array, DataSource, Ids
from shoal.data.sources.parquet_rows import ParquetReader
from shoal.data.sources.table import ColumnLayout, ConvertedRows
from shoal.data.sources.table_cache import TableBlock, convert_block
from shoal.data.sources.values import to_numpy
from shoal.errors import error

# Enough for the windows in which samplers shuffle, and no more memory than that needs.
_CACHED_GROUPS = 16
_MIN_CACHE_BYTES = 32 << 20
_MAX_CACHE_BYTES = 256 << 20


class ParquetRowGroupSource(DataSource):
    """`blocks` are the row groups. Values are checked when decoded, or when opened if rows may be skipped."""

    in_memory = False

    def __init__(self, reader: ParquetReader, layout: ColumnLayout, *, skip_bad_rows: bool) -> None:
        self._reader = reader
        self._layout = layout
        self.input_columns = layout.inputs
        self._skip_bad_rows = skip_bad_rows
        self._cache: OrderedDict[int, ConvertedRows] = OrderedDict()
        self._cache_bytes = 0
        self._lock = threading.Lock()
        self._decode_locks: dict[int, threading.Lock] = {}
        self._bad_rows = self._find_bad_rows()
        self.classes, self.encoders = layout.classes, layout.encoders
        self.skipped_rows = sum(len(rows) for rows in self._bad_rows.values())
        ends = np.cumsum([g.rows - len(self._bad_rows.get(i, ())) for i, g in enumerate(reader.groups)])
        self._size = int(ends[-1])
        if not self._size:
            raise error("SH302", "no good row", where=reader.files[0].path)
        self.blocks = np.concatenate([[0], ends[:-1]]).astype(np.int64)

    def __len__(self) -> int:
        return self._size

    def take(self, ids: Ids) -> Batch:
        return self.take_each([ids])[0]

    def take_each(self, parts: Sequence[Ids]) -> list[Batch]:
        """Each group is read once for all parts: few long copies, in which other threads compute."""
        assert self.blocks is not None
        ids = np.concatenate(parts)
        order = np.argsort(ids)
        in_order = ids[order]
        group_of = self._groups_of(in_order)
        cuts = [0, *(np.flatnonzero(np.diff(group_of)) + 1).tolist(), len(ids)]
        groups = [self._decoded_group(index) for index in group_of[cuts[:-1]].tolist()]
        rows = in_order - self.blocks[group_of]
        back = np.empty_like(order)
        back[order] = np.arange(len(ids))
        places = np.split(back, np.cumsum([len(part) for part in parts])[:-1])
        inputs = self._gather([group.inputs for group in groups], rows, cuts)
        targets = [group.target for group in groups if group.target is not None]
        target = self._gather(targets, rows, cuts) if targets else None
        return [
            Batch((_rows(inputs, place),), None if target is None else _rows(target, place), len(place))
            for place in places
        ]

    def _gather(self, parts: list[Array], rows: Ids, cuts: list[int]) -> Array:
        """Rows cuts[i] to cuts[i + 1] come from part i."""
        out = np.empty((len(rows), *parts[0].shape[1:]), parts[0].dtype)
        for part, (start, stop) in zip(parts, pairwise(cuts), strict=True):
            self._check_width(out, part)
            # Rows are inside of their group; `clip` only spares numpy a copy.
            np.take(part, rows[start:stop], axis=0, out=out[start:stop], mode="clip")
        return out

    def _groups_of(self, ids: Ids) -> Ids:
        assert self.blocks is not None
        return np.searchsorted(self.blocks, ids, side="right") - 1

    def warm(self, ids: Ids) -> None:
        """Decode the row groups of these samples. Called from a side thread before they are needed."""
        for index in np.unique(self._groups_of(ids)).tolist():
            self._decoded_group(index)

    def sizes(self) -> Array:
        row = self.take(np.zeros(1, dtype=np.int64)).inputs[0]
        return np.full(len(self), row.nbytes, dtype=np.int64)

    def targets(self) -> Array:
        if self._layout.target_type == "none":
            raise error("SH303", "the data has no target", fix="Name the target in data.source.target.")
        layout = replace(self._layout, inputs=(), tokens=False)
        parts = [self._decode(i, layout).target for i in range(len(self._reader.groups))]
        return np.concatenate([part for part in parts if part is not None])

    def own_columns(self) -> list[str]:
        return list(self._reader.kinds)

    def own_column(self, name: str) -> Array:
        groups = range(len(self._reader.groups))
        columns = [to_numpy(self._reader.read_group(i, [name]).column(name)) for i in groups]
        return np.concatenate([np.delete(column, self._bad_rows.get(i, [])) for i, column in enumerate(columns)])

    def _find_bad_rows(self) -> dict[int, Array]:
        """The bad rows of each group. All groups are decoded only if rows may be skipped.

        Otherwise a group is decoded here if its metadata reports missing values, so that the error comes now and not
        hours later.
        """
        bad = {}
        for index in range(len(self._reader.groups)):
            if self._skip_bad_rows or self._reader.has_nulls(index, self._layout.columns):
                rows = np.flatnonzero(self._convert(index, self._layout).bad_rows)
                if len(rows):
                    bad[index] = rows
        return bad

    def _decoded_group(self, index: int) -> ConvertedRows:
        """A decoded group. Two threads that need the same group decode it once; other threads do not wait."""
        with self._lock:
            group = self._cache.get(index)
            if group is not None:
                self._cache.move_to_end(index)
                return group
            decode_lock = self._decode_locks.setdefault(index, threading.Lock())
        with decode_lock:
            with self._lock:
                group = self._cache.get(index)
            if group is None:
                group = self._decode(index, self._layout)
                self._add_to_cache(index, group)
        return group

    def _add_to_cache(self, index: int, group: ConvertedRows) -> None:
        with self._lock:
            self._decode_locks.pop(index, None)
            self._cache[index] = group
            self._cache_bytes += group.inputs.nbytes
            while self._cache_is_full():
                _, oldest = self._cache.popitem(last=False)
                self._cache_bytes -= oldest.inputs.nbytes

    def _cache_is_full(self) -> bool:
        most = _MIN_CACHE_BYTES if len(self._cache) > _CACHED_GROUPS else _MAX_CACHE_BYTES
        return self._cache_bytes > most and len(self._cache) > 1

    def _decode(self, index: int, layout: ColumnLayout) -> ConvertedRows:
        whole = self._convert(index, layout)
        bad = self._bad_rows.get(index)
        if bad is None:
            return whole
        target = None if whole.target is None else np.delete(whole.target, bad, axis=0)
        return ConvertedRows(np.delete(whole.inputs, bad, axis=0), target, whole.bad_rows)

    def _convert(self, index: int, layout: ColumnLayout) -> ConvertedRows:
        table = self._reader.read_group(index, layout.columns)
        block = TableBlock(table, lambda row: self._reader.locate(index, row))
        return convert_block(block, layout, skip_bad_rows=self._skip_bad_rows)

    def _check_width(self, inputs: Array, part: Array) -> None:
        if inputs.shape[1:] != part.shape[1:]:
            raise error("SH306", "row groups hold lists of different lengths", where=self._reader.files[0].path)


def _rows(values: Array, places: Ids) -> Tensor:
    """These rows, in memory that begins where torch lets tensors begin."""
    out = torch.from_numpy(values[:0]).new_empty((len(places), *values.shape[1:]))
    np.take(values, places, axis=0, out=out.numpy(), mode="clip")
    return out
