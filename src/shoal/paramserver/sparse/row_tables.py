"""A server's rows of all sparse tables: those of its chunks, which move with the chunks.

A row that was never updated is not stored: its initial values are computed on request. The rows changed by the last
step are also kept in their previous state, because workers that repeat the step must start from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from shoal.lanes.sparse.keys import Floats, Keys, chunks_of
from shoal.lanes.sparse.optimizers import update_rows
from shoal.lanes.sparse.rows import RowBundle, SparseRows, add_rows, copy_matching_rows, empty_rows
from shoal.lanes.sparse.table_spec import TableSpec
from shoal.paramserver.sparse.hash_store import RowStore

CURRENT, PREVIOUS = 0, 1
RowGradients = Mapping[int, SparseRows]
"""Gradients, by table."""


class RowTables:
    """Chunks are given as ranges [first, last), as everywhere on a server."""

    def __init__(self, tables: Sequence[TableSpec]) -> None:
        self.tables = list(tables)
        self.dims = [table.dim for table in tables]
        self.widths = [table.width for table in tables]
        self._stores = [RowStore(width) for width in self.widths]
        self._previous: dict[tuple[int, int], list[SparseRows]] = {}

    def __len__(self) -> int:
        """Number of stored rows."""
        return sum(map(len, self._stores))

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self._stores)

    # ---- steps ----

    def read(self, table: int, keys: Keys, *, step: int | None = None, applied: Keys | None = None) -> Floats:
        """The rows' current values; in chunks that have already applied `step`, their values before it."""
        rows = self._full_rows(table, keys)
        if step is not None and applied is not None:
            ahead = np.flatnonzero(applied[chunks_of(keys)] > step)
            if len(ahead):
                previous = rows[ahead]
                for kept in self._previous.values():
                    copy_matching_rows(kept[table], keys[ahead], previous)
                rows[ahead] = previous
        return np.ascontiguousarray(rows[:, : self.dims[table]])

    def apply(
        self,
        first: int,
        last: int,
        gradients: RowGradients,
        *,
        scale: float = 1.0,
        clip: float | None = None,
        keep_previous: bool = True,
    ) -> None:
        """Update the rows of these chunks that have a gradient once; keep their previous state."""
        before = [empty_rows(width) for width in self.widths]
        for number, grads in gradients.items():
            before[number] = self._update_rows(number, grads.in_chunks(first, last), scale, clip)
        self._drop_previous(first, last)
        if keep_previous:
            self._previous[first, last] = before

    def _update_rows(self, number: int, grads: SparseRows, scale: float, clip: float | None) -> SparseRows:
        """Returns the rows' previous state."""
        table, store = self.tables[number], self._stores[number]
        indices = store.find(grads.keys)
        rows = self._full_rows(number, grads.keys, indices)
        old = SparseRows(grads.keys, rows.copy())
        values = grads.values if clip is None else grads.values.clip(-clip, clip)
        update_rows(table.optimizer, rows, values, lr=table.lr * scale, eps=table.eps)
        stored = indices >= 0
        store.write(indices[stored], rows[stored])
        store.insert(grads.keys[~stored], rows[~stored])
        return old

    def _full_rows(self, number: int, keys: Keys, indices: Keys | None = None) -> Floats:
        """Values and optimizer state, also of rows that are not stored."""
        table, store = self.tables[number], self._stores[number]
        indices = store.find(keys) if indices is None else indices
        new = np.flatnonzero(indices < 0)
        if not len(new):
            return store.read(indices)
        rows = np.zeros((len(keys), table.width), dtype=np.float32)
        stored = np.flatnonzero(indices >= 0)
        rows[stored] = store.read(indices[stored])
        rows[new, : table.dim] = table.initial_rows(keys[new])
        return rows

    # ---- contents ----

    def read_rows(self, first: int, last: int) -> list[SparseRows]:
        """Copies of all rows of these chunks, by table."""
        return [store.read_chunks(first, last) for store in self._stores]

    def read_bundles(self, first: int, last: int) -> list[RowBundle]:
        """Current and previous rows, for `write_bundles` on another server."""
        current = [RowBundle(CURRENT, number, rows) for number, rows in enumerate(self.read_rows(first, last))]
        previous = [RowBundle(PREVIOUS, number, rows) for number, rows in enumerate(self._previous_rows(first, last))]
        return current + previous

    def _previous_rows(self, first: int, last: int) -> list[SparseRows]:
        """The rows that the last step changed, before it."""
        found = [empty_rows(width) for width in self.widths]
        for kept in self._previous.values():
            found = [add_rows(a, b.in_chunks(first, last)) for a, b in zip(found, kept, strict=True)]
        return found

    def write_bundles(self, first: int, last: int, bundles: Sequence[RowBundle]) -> None:
        """Replace the rows of these chunks by these, each given once."""
        self.drop(first, last)
        before = [empty_rows(width) for width in self.widths]
        for kind, number, rows in bundles:
            inside = rows.in_chunks(first, last)
            if kind == PREVIOUS:
                before[number] = add_rows(before[number], inside)
            else:
                self._stores[number].insert(inside.keys, inside.values)
        self._previous[first, last] = before

    def drop(self, first: int, last: int) -> None:
        for store in self._stores:
            store.drop(first, last)
        self._drop_previous(first, last)

    def _drop_previous(self, first: int, last: int) -> None:
        """Drop the previous rows of these chunks."""
        for (begin, end), kept in list(self._previous.items()):
            if begin < last and first < end:
                del self._previous[begin, end]
                for a, b in ((begin, first), (last, end)):
                    if a < b:  # the pieces had other boundaries then
                        self._previous[a, b] = [rows.in_chunks(a, b) for rows in kept]


def digests(contents: Sequence[SparseRows], first: int, last: int) -> list[str]:
    """A digest per chunk: equal if the chunk has the same rows, bit for bit."""
    return [_digest([rows.in_chunks(i, i + 1) for rows in contents]) for i in range(first, last)]


def _digest(contents: Sequence[SparseRows]) -> str:
    sha256 = hashlib.sha256()
    for rows in contents:
        sha256.update(len(rows).to_bytes(8, "little"))
        sha256.update(np.ascontiguousarray(rows.keys).data)
        sha256.update(np.ascontiguousarray(rows.values).data)
    return sha256.hexdigest()
