"""Rows by key in this process's memory: an open-addressing hash table over arrays, with batched lookups.

Memory per row: its floats, 8 bytes for the key, up to an eighth of that for growth, and 8 to 16 bytes of index.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.lanes.sparse.keys import Floats, Keys, first_key, splitmix64
from shoal.lanes.sparse.rows import SparseRows

RowIndices = NDArray[np.int64]
MAX_STORED_ROWS = (1 << 31) - 1
_MIN_INDEX_SIZE = 1 << 10
_MIN_CAPACITY = 1 << 10


class RowStore:
    """Rows of `width` floats in the order of insertion; their indices stay the same until rows are dropped."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._count = 0
        self._keys: Keys = np.empty(0, dtype=np.int64)
        self._rows: Floats = np.empty((0, width), dtype=np.float32)
        self._index: NDArray[np.int32] = np.full(_MIN_INDEX_SIZE, -1, dtype=np.int32)

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._rows.nbytes + self._index.nbytes

    def find(self, keys: Keys) -> RowIndices:
        """The indices of rows; -1 for missing ones."""
        found = np.full(len(keys), -1, dtype=np.int64)
        if not self._count:
            return found
        pending: RowIndices = np.arange(len(keys))
        slots = self._hash_slots(keys)
        while len(pending):
            row = self._index[slots]
            taken = row >= 0
            pending, slots, row = pending[taken], slots[taken], row[taken]
            same = self._keys[row] == keys[pending]
            found[pending[same]] = row[same]
            pending, slots = pending[~same], (slots[~same] + 1) & (len(self._index) - 1)
        return found

    def read(self, indices: RowIndices) -> Floats:
        """Copies of these rows."""
        return self._rows.take(indices, axis=0)

    def write(self, indices: RowIndices, rows: Floats) -> None:
        self._rows[indices] = rows

    def insert(self, keys: Keys, rows: Floats) -> None:
        """Insert rows with distinct keys that are not stored yet."""
        if self._count + len(keys) > MAX_STORED_ROWS:
            raise MemoryError(f"more than {MAX_STORED_ROWS} rows")
        self._reserve(self._count + len(keys))
        begin, self._count = self._count, self._count + len(keys)
        self._keys[begin : self._count] = keys
        self._rows[begin : self._count] = rows
        if 2 * self._count > len(self._index):
            self._rebuild_index()
        else:
            self._index_rows(begin)

    def read_chunks(self, first: int, last: int) -> SparseRows:
        """Copies of all rows of the chunks [first, last), by ascending key."""
        rows_at = np.flatnonzero(self._in_chunks(first, last))
        rows_at = rows_at[np.argsort(self._keys[rows_at], kind="stable")]
        return SparseRows(self._keys[rows_at], self.read(rows_at))

    def drop(self, first: int, last: int) -> None:
        """Drop the rows of these chunks."""
        dropped = self._in_chunks(first, last)
        if not dropped.any():
            return
        kept = np.flatnonzero(~dropped)
        self._keys, self._rows, self._count = self._keys[kept], self._rows[kept], len(kept)
        self._rebuild_index()

    def _in_chunks(self, first: int, last: int) -> NDArray[np.bool_]:
        keys = self._keys[: self._count]
        return (keys >= first_key(first)) & (keys < first_key(last))

    # ---- memory ----

    def _reserve(self, count: int) -> None:
        """Make space for this many rows. Large arrays grow without being copied."""
        if count > len(self._keys):
            capacity = max(count + count // 8, _MIN_CAPACITY)
            self._keys.resize(capacity, refcheck=False)
            self._rows.resize((capacity, self.width), refcheck=False)

    def _hash_slots(self, keys: Keys) -> RowIndices:
        return (splitmix64(keys.view(np.uint64)) & np.uint64(len(self._index) - 1)).view(np.int64)

    def _rebuild_index(self) -> None:
        """Rebuild the index at the right size: between a quarter and a half full."""
        size = max(_MIN_INDEX_SIZE, 1 << (2 * self._count - 1).bit_length() if self._count else 0)
        if size == len(self._index):
            self._index.fill(-1)
        else:
            self._index = np.full(size, -1, dtype=np.int32)
        self._index_rows(0)

    def _index_rows(self, begin: int) -> None:
        """Add the rows from `begin` on to the index, a bounded number at a time."""
        for start in range(begin, self._count, 1 << 20):
            rows_at = np.arange(start, min(start + (1 << 20), self._count), dtype=np.int32)
            slots = self._hash_slots(self._keys[rows_at])
            while len(rows_at):
                free = np.flatnonzero(self._index[slots] < 0)
                self._index[slots[free]] = rows_at[free]  # of several rows with the same slot, one gets it
                unplaced = self._index[slots] != rows_at
                rows_at, slots = rows_at[unplaced], (slots[unplaced] + 1) & (len(self._index) - 1)
