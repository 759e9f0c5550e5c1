"""What a server holds of all sparse tables: the rows of its chunks, which go wherever the chunks go.

A row that was never changed is not stored: it is made when somebody asks. Of the last step the rows that it changed are
kept as they were before: workers that must do that step again have to start from there.
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
    """Chunks are named by ranges [first, last), as everywhere on a server."""

    def __init__(self, tables: Sequence[TableSpec]) -> None:
        self.tables = list(tables)
        self.dims = [table.dim for table in tables]
        self.widths = [table.width for table in tables]
        self._stores = [RowStore(width) for width in self.widths]
        self._previous: dict[tuple[int, int], list[SparseRows]] = {}

    def __len__(self) -> int:
        """All rows that are stored."""
        return sum(map(len, self._stores))

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self._stores)

    # ---- steps ----

    def read(self, table: int, keys: Keys, *, step: int | None = None, applied: Keys | None = None) -> Floats:
        """The rows' values now; or, of chunks that have applied the step already, as they were before it."""
        rows = self._full_rows(table, keys)
        if step is not None and applied is not None:
            behind = np.flatnonzero(applied[chunks_of(keys)] > step)
            if len(behind):
                then = rows[behind]
                for kept in self._previous.values():
                    copy_matching_rows(kept[table], keys[behind], then)
                rows[behind] = then
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
        """One update of the rows of these chunks that have a gradient; what they were is remembered."""
        before = [empty_rows(width) for width in self.widths]
        for number, grads in gradients.items():
            before[number] = self._update_rows(number, grads.in_chunks(first, last), scale, clip)
        self._drop_previous(first, last)
        if keep_previous:
            self._previous[first, last] = before

    def _update_rows(self, number: int, grads: SparseRows, scale: float, clip: float | None) -> SparseRows:
        """Returns what the rows were."""
        table, store = self.tables[number], self._stores[number]
        places = store.find(grads.keys)
        rows = self._full_rows(number, grads.keys, places)
        old = SparseRows(grads.keys, rows.copy())
        values = grads.values if clip is None else grads.values.clip(-clip, clip)
        update_rows(table.optimizer, rows, values, lr=table.lr * scale, eps=table.eps)
        there = places >= 0
        store.write(places[there], rows[there])
        store.insert(grads.keys[~there], rows[~there])
        return old

    def _full_rows(self, number: int, keys: Keys, places: Keys | None = None) -> Floats:
        """Values and slots, also of rows that are not stored."""
        table, store = self.tables[number], self._stores[number]
        places = store.find(keys) if places is None else places
        new = np.flatnonzero(places < 0)
        if not len(new):
            return store.read(places)
        rows = np.zeros((len(keys), table.width), dtype=np.float32)
        there = np.flatnonzero(places >= 0)
        rows[there] = store.read(places[there])
        rows[new, : table.dim] = table.initial_rows(keys[new])
        return rows

    # ---- contents ----

    def read_rows(self, first: int, last: int) -> list[SparseRows]:
        """All rows of these chunks, by table: copies."""
        return [store.read_chunks(first, last) for store in self._stores]

    def read_bundles(self, first: int, last: int) -> list[RowBundle]:
        """For `put`, on another server."""
        now = [RowBundle(CURRENT, number, rows) for number, rows in enumerate(self.read_rows(first, last))]
        return now + [RowBundle(PREVIOUS, number, rows) for number, rows in enumerate(self._previous_rows(first, last))]

    def _previous_rows(self, first: int, last: int) -> list[SparseRows]:
        """What the last step changed of them, as it was."""
        found = [empty_rows(width) for width in self.widths]
        for kept in self._previous.values():
            found = [add_rows(a, b.in_chunks(first, last)) for a, b in zip(found, kept, strict=True)]
        return found

    def write_bundles(self, first: int, last: int, bundles: Sequence[RowBundle]) -> None:
        """Hold these rows, each once, in place of what is held of these chunks."""
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
        """What these chunks were before is of no use any more."""
        for (begin, end), kept in list(self._previous.items()):
            if begin < last and first < end:
                del self._previous[begin, end]
                for a, b in ((begin, first), (last, end)):
                    if a < b:  # pieces were others then
                        self._previous[a, b] = [rows.in_chunks(a, b) for rows in kept]


def digests(contents: Sequence[SparseRows], first: int, last: int) -> list[str]:
    """Of each chunk: equal if it has the same rows, down to the bit."""
    return [_digest([rows.in_chunks(i, i + 1) for rows in contents]) for i in range(first, last)]


def _digest(contents: Sequence[SparseRows]) -> str:
    sha256 = hashlib.sha256()
    for rows in contents:
        sha256.update(len(rows).to_bytes(8, "little"))
        sha256.update(np.ascontiguousarray(rows.keys).data)
        sha256.update(np.ascontiguousarray(rows.values).data)
    return sha256.hexdigest()
