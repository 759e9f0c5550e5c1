"""What a server holds of all sparse tables: the rows of its chunks, which go wherever the chunks go.

A row that was never changed is not stored: it is made when somebody asks. Of the last step the rows that it changed are
kept as they were before: workers that must do that step again have to start from there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from shoal.parallel.sparse.keys import Floats, Keys, chunks_of
from shoal.parallel.sparse.rows import Bundle, Rows, add, look_up, none_of
from shoal.parallel.sparse.spec import TableSpec
from shoal.parallel.sparse.store import RowStore
from shoal.parallel.sparse.updates import update

NOW, BEFORE = 0, 1
Changes = Mapping[int, Rows]
"""Gradients, by table."""


class Shelf:
    """Chunks are named by ranges [first, last), as everywhere on a server."""

    def __init__(self, tables: Sequence[TableSpec]) -> None:
        self.tables = list(tables)
        self.dims = [table.dim for table in tables]
        self.widths = [table.width for table in tables]
        self._stores = [RowStore(width) for width in self.widths]
        self._before: dict[tuple[int, int], list[Rows]] = {}

    def __len__(self) -> int:
        """All rows that are stored."""
        return sum(map(len, self._stores))

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self._stores)

    # ---- steps ----

    def read(self, table: int, keys: Keys, *, step: int | None = None, applied: Keys | None = None) -> Floats:
        """The rows' values now; or, of chunks that have applied the step already, as they were before it."""
        rows = self._whole(table, keys)
        if step is not None and applied is not None:
            behind = np.flatnonzero(applied[chunks_of(keys)] > step)
            if len(behind):
                then = rows[behind]
                for kept in self._before.values():
                    look_up(kept[table], keys[behind], then)
                rows[behind] = then
        return np.ascontiguousarray(rows[:, : self.dims[table]])

    def apply(
        self,
        first: int,
        last: int,
        changes: Changes,
        *,
        scale: float = 1.0,
        clip: float | None = None,
        remember: bool = True,
    ) -> None:
        """One update of the rows of these chunks that have a gradient; what they were is remembered."""
        before = [none_of(width) for width in self.widths]
        for number, grads in changes.items():
            before[number] = self._change(number, grads.between(first, last), scale, clip)
        self._forget(first, last)
        if remember:
            self._before[first, last] = before

    def _change(self, number: int, grads: Rows, scale: float, clip: float | None) -> Rows:
        """Returns what the rows were."""
        table, store = self.tables[number], self._stores[number]
        places = store.find(grads.keys)
        rows = self._whole(number, grads.keys, places)
        old = Rows(grads.keys, rows.copy())
        values = grads.values if clip is None else grads.values.clip(-clip, clip)
        update(table.optimizer, rows, values, lr=table.lr * scale, eps=table.eps)
        there = places >= 0
        store.write(places[there], rows[there])
        store.insert(grads.keys[~there], rows[~there])
        return old

    def _whole(self, number: int, keys: Keys, places: Keys | None = None) -> Floats:
        """Values and slots, also of rows that are not stored."""
        table, store = self.tables[number], self._stores[number]
        places = store.find(keys) if places is None else places
        new = np.flatnonzero(places < 0)
        if not len(new):
            return store.read(places)
        rows = np.zeros((len(keys), table.width), dtype=np.float32)
        there = np.flatnonzero(places >= 0)
        rows[there] = store.read(places[there])
        rows[new, : table.dim] = table.fresh(keys[new])
        return rows

    # ---- contents ----

    def take(self, first: int, last: int) -> list[Rows]:
        """All rows of these chunks, by table: copies."""
        return [store.take(first, last) for store in self._stores]

    def take_all(self, first: int, last: int) -> list[Bundle]:
        """For `put`, on another server."""
        now = [Bundle(NOW, number, rows) for number, rows in enumerate(self.take(first, last))]
        return now + [Bundle(BEFORE, number, rows) for number, rows in enumerate(self._changed(first, last))]

    def _changed(self, first: int, last: int) -> list[Rows]:
        """What the last step changed of them, as it was."""
        found = [none_of(width) for width in self.widths]
        for kept in self._before.values():
            found = [add(a, b.between(first, last)) for a, b in zip(found, kept, strict=True)]
        return found

    def put(self, first: int, last: int, bundles: Sequence[Bundle]) -> None:
        """Hold these rows, each once, in place of what is held of these chunks."""
        self.drop(first, last)
        before = [none_of(width) for width in self.widths]
        for kind, number, rows in bundles:
            inside = rows.between(first, last)
            if kind == BEFORE:
                before[number] = add(before[number], inside)
            else:
                self._stores[number].insert(inside.keys, inside.values)
        self._before[first, last] = before

    def drop(self, first: int, last: int) -> None:
        for store in self._stores:
            store.drop(first, last)
        self._forget(first, last)

    def _forget(self, first: int, last: int) -> None:
        """What these chunks were before is of no use any more."""
        for (begin, end), kept in list(self._before.items()):
            if begin < last and first < end:
                del self._before[begin, end]
                for a, b in ((begin, first), (last, end)):
                    if a < b:  # pieces were others then
                        self._before[a, b] = [rows.between(a, b) for rows in kept]


def digests(contents: Sequence[Rows], first: int, last: int) -> list[str]:
    """Of each chunk: equal if it has the same rows, down to the bit."""
    return [_digest([rows.between(i, i + 1) for rows in contents]) for i in range(first, last)]


def _digest(contents: Sequence[Rows]) -> str:
    sha256 = hashlib.sha256()
    for rows in contents:
        sha256.update(len(rows).to_bytes(8, "little"))
        sha256.update(np.ascontiguousarray(rows.keys).data)
        sha256.update(np.ascontiguousarray(rows.values).data)
    return sha256.hexdigest()
