"""The rows of a finished run in this process's memory, for a model that is looked at without servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.checkpoint.files import open_files
from shoal.checkpoint.manifest import step_of
from shoal.checkpoint.store import Store
from shoal.errors import error
from shoal.parallel.sparse.keys import Floats, Keys
from shoal.parallel.sparse.module import SparseTable
from shoal.parallel.sparse.saved import Saved, load
from shoal.parallel.sparse.shelf import Shelf
from shoal.parallel.sparse.spec import TableSpec


class Loaded:
    """All rows of all tables."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf

    def read(self, table: TableSpec, keys: Keys) -> Floats:
        return self._shelf.read(table.number, keys)


def bind_saved(tables: Sequence[SparseTable], checkpoint: str, *, seed: int) -> None:
    """Let a model's tables have the rows of a checkpoint, which is named by its manifest. SH419 if it is gone, SH502
    if it is damaged."""
    step = step_of(checkpoint)
    if step is None:
        raise error("SH419", "the checkpoint with the rows of the model's sparse tables is gone")
    directory = checkpoint.rpartition("/")[0]
    root, _, name = directory.rpartition("/")
    state = Store(root, job_sha256=None, name=name).load(step, section="loop")[1]
    saved = [Saved.from_description(one) for one in (state["sync"] or {}).get("rows", [])]
    if not saved:
        raise error("SH419", "the checkpoint has no rows of sparse tables", where=checkpoint)
    chunks = max(one.last for one in saved)
    for number, table in enumerate(tables):
        table.spec = replace(table.spec, number=number, seed=seed)
    shelf = Shelf([table.spec for table in tables])
    shelf.put(0, chunks, load(open_files(root), saved, shelf.tables, 0, chunks))
    for table in tables:
        table.bind(Loaded(shelf), chunks=chunks - 1)
