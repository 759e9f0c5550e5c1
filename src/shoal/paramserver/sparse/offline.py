"""The rows of a finished run in this process's memory, for using a model without servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shoal.checkpoint.files import open_files
from shoal.checkpoint.manifest import step_from_path
from shoal.checkpoint.store import CheckpointStore
from shoal.errors import error
from shoal.lanes.sparse.embedding import SparseTable
from shoal.lanes.sparse.keys import Floats, Keys
from shoal.lanes.sparse.table_spec import TableSpec
from shoal.paramserver.sparse.checkpoint import RowBlob, load_rows
from shoal.paramserver.sparse.row_tables import RowTables


class OfflineRows:
    """All rows of all tables."""

    def __init__(self, row_tables: RowTables) -> None:
        self._row_tables = row_tables

    def read(self, table: TableSpec, keys: Keys) -> Floats:
        return self._row_tables.read(table.number, keys)


def bind_checkpoint_rows(tables: Sequence[SparseTable], checkpoint: str, *, seed: int) -> None:
    """Bind a model's tables to the rows of a checkpoint, given by its manifest. SH419 if it is missing, SH502 if it is
    damaged."""
    step = step_from_path(checkpoint)
    if step is None:
        raise error("SH419", "the checkpoint with the rows of the model's sparse tables is gone")
    directory = checkpoint.rpartition("/")[0]
    root, _, name = directory.rpartition("/")
    state = CheckpointStore(root, job_sha256=None, name=name).load(step, section="loop")[1]
    saved = [RowBlob.from_description(one) for one in (state["sync"] or {}).get("rows", [])]
    if not saved:
        raise error("SH419", "the checkpoint has no rows of sparse tables", where=checkpoint)
    chunks = max(one.last for one in saved)
    for number, table in enumerate(tables):
        table.spec = replace(table.spec, number=number, seed=seed)
    row_tables = RowTables([table.spec for table in tables])
    row_tables.write_bundles(0, chunks, load_rows(open_files(root), saved, row_tables.tables, 0, chunks))
    for table in tables:
        table.bind(OfflineRows(row_tables), chunks=chunks - 1)
