"""A Parquet table of any size: samples come from row groups, of which the last used stay decoded."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import torch

from shoal.data.batch import Batch
from shoal.data.source import Array, Ids, Source
from shoal.data.sources.parquet_rows import ParquetRows
from shoal.data.sources.stored import Block, converted
from shoal.data.sources.table import Converted, Layout, values
from shoal.errors import error

# Enough for the windows in which `deal` shuffles, and no more memory than that needs.
_KEPT_GROUPS = 16
_LEAST_KEPT_BYTES = 32 << 20
_MOST_KEPT_BYTES = 256 << 20


class ParquetGroups(Source):
    """`blocks` are the row groups. Values are checked at decoding, or at opening if rows may be skipped."""

    in_memory = False

    def __init__(self, table: ParquetRows, layout: Layout, *, skip: bool) -> None:
        self._table = table
        self._layout = layout
        self._skip = skip
        self._kept: OrderedDict[int, Converted] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()
        self._turns: dict[int, threading.Lock] = {}
        self._bad = self._survey()
        self.classes = layout.classes
        self.skipped = sum(len(rows) for rows in self._bad.values())
        ends = np.cumsum([g.rows - len(self._bad.get(i, ())) for i, g in enumerate(table.groups)])
        self._size = int(ends[-1])
        if not self._size:
            raise error("SH302", "no good row", where=table.files[0].path)
        self.blocks = np.concatenate([[0], ends[:-1]]).astype(np.int64)

    def __len__(self) -> int:
        return self._size

    def take(self, ids: Ids) -> Batch:
        assert self.blocks is not None
        group_of = self._groups_of(ids)
        inputs: Array | None = None
        target: Array | None = None
        for index in np.unique(group_of).tolist():
            group = self._group(index)
            if inputs is None:
                inputs = np.empty((len(ids), *group.inputs.shape[1:]), group.inputs.dtype)
                target = (
                    None if group.target is None else np.empty((len(ids), *group.target.shape[1:]), group.target.dtype)
                )
            places = np.flatnonzero(group_of == index)
            rows = ids[places] - self.blocks[index]
            self._check_width(inputs, group)
            inputs[places] = group.inputs[rows]
            if target is not None and group.target is not None:
                target[places] = group.target[rows]
        assert inputs is not None
        return Batch((torch.from_numpy(inputs),), None if target is None else torch.from_numpy(target), len(ids))

    def _groups_of(self, ids: Ids) -> Ids:
        assert self.blocks is not None
        return np.searchsorted(self.blocks, ids, side="right") - 1

    def warm(self, ids: Ids) -> None:
        """Decode the row groups of these samples: called beside training, before they are needed."""
        for index in np.unique(self._groups_of(ids)).tolist():
            self._group(index)

    def sizes(self) -> Array:
        row = self.take(np.zeros(1, dtype=np.int64)).inputs[0]
        return np.full(len(self), row.nbytes, dtype=np.int64)

    def targets(self) -> Array:
        if self._layout.target_type == "none":
            raise error("SH303", "the data has no target", fix="Name the target in data.source.target.")
        layout = replace(self._layout, inputs=(), tokens=False)
        parts = [self._decode(i, layout).target for i in range(len(self._table.groups))]
        return np.concatenate([part for part in parts if part is not None])

    def own_columns(self) -> list[str]:
        return list(self._table.kinds)

    def own_column(self, name: str) -> Array:
        groups = range(len(self._table.groups))
        columns = [values(self._table.read(i, [name]).column(name)) for i in groups]
        return np.concatenate([np.delete(column, self._bad.get(i, [])) for i, column in enumerate(columns)])

    def _survey(self) -> dict[int, Array]:
        """The bad rows of each group; all groups are looked at only if rows may be skipped.

        Else a group is decoded here if the file says that values are missing: better now than hours later.
        """
        bad = {}
        for index in range(len(self._table.groups)):
            if self._skip or self._table.has_nulls(index, self._layout.used):
                rows = np.flatnonzero(self._convert(index, self._layout).bad)
                if len(rows):
                    bad[index] = rows
        return bad

    def _group(self, index: int) -> Converted:
        """A decoded group. Two threads that want the same one decode it once; others are not held up."""
        with self._lock:
            group = self._kept.get(index)
            if group is not None:
                self._kept.move_to_end(index)
                return group
            turn = self._turns.setdefault(index, threading.Lock())
        with turn:
            with self._lock:
                group = self._kept.get(index)
            if group is None:
                group = self._decode(index, self._layout)
                self._keep(index, group)
        return group

    def _keep(self, index: int, group: Converted) -> None:
        with self._lock:
            self._turns.pop(index, None)
            self._kept[index] = group
            self._kept_bytes += group.inputs.nbytes
            while self._too_many():
                _, oldest = self._kept.popitem(last=False)
                self._kept_bytes -= oldest.inputs.nbytes

    def _too_many(self) -> bool:
        most = _LEAST_KEPT_BYTES if len(self._kept) > _KEPT_GROUPS else _MOST_KEPT_BYTES
        return self._kept_bytes > most and len(self._kept) > 1

    def _decode(self, index: int, layout: Layout) -> Converted:
        whole = self._convert(index, layout)
        bad = self._bad.get(index)
        if bad is None:
            return whole
        target = None if whole.target is None else np.delete(whole.target, bad, axis=0)
        return Converted(np.delete(whole.inputs, bad, axis=0), target, whole.bad)

    def _convert(self, index: int, layout: Layout) -> Converted:
        table = self._table.read(index, layout.used)
        block = Block(table, lambda row: self._table.place(index, row))
        return converted(block, layout, skip=self._skip)

    def _check_width(self, inputs: Array, group: Converted) -> None:
        if inputs.shape[1:] != group.inputs.shape[1:]:
            raise error("SH306", "row groups hold lists of different lengths", where=self._table.files[0].path)
