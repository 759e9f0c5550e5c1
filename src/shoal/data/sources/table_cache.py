"""Load a table once: a small one into memory, a large one into memory-mapped files in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from shoal.data.cache import NpyWriter, reading_cache
from shoal.data.source import Array
from shoal.data.sources.arrays import ArraySource, InMemoryRows, MemoryMappedRows, RowArray
from shoal.data.sources.table import ColumnLayout, ConvertedRows, convert, explain_bad_row
from shoal.errors import ShoalError, error


@dataclass(frozen=True)
class TableBlock:
    """Some rows of a table; `locate` returns the place of a row, for messages."""

    table: pa.Table | pa.RecordBatch
    locate: Callable[[int], str]


@dataclass(frozen=True)
class LoadedTable:
    """Inputs, target, and the ids of the skipped rows."""

    inputs: Array
    target: Array | None
    bad_rows: Array


def convert_block(block: TableBlock, layout: ColumnLayout, *, skip_bad_rows: bool) -> ConvertedRows:
    """The arrays of a block. Bad rows are marked if they may be skipped; otherwise an error names the place."""
    try:
        result = convert(block.table, layout)
    except ShoalError as failure:
        raise failure.at(block.locate(0)) from None
    if result.bad_rows.any() and not skip_bad_rows:
        row = int(np.flatnonzero(result.bad_rows)[0])
        code, message = explain_bad_row(block.table, row, layout)
        raise error(code, message, where=block.locate(row))
    return result


def load_in_memory(
    blocks: Iterable[TableBlock], layout: ColumnLayout, *, skip_bad_rows: bool, where: str
) -> LoadedTable:
    """Load the whole table into memory."""
    parts = [convert_block(block, layout, skip_bad_rows=skip_bad_rows) for block in blocks]
    good = [part.good_rows() for part in parts if not part.bad_rows.all()]
    if not good:
        raise error("SH302", "no good row", where=where)
    _check_widths(good, where)
    targets = [part.target for part in good if part.target is not None]
    bad = np.flatnonzero(np.concatenate([part.bad_rows for part in parts]))
    return LoadedTable(
        np.concatenate([part.inputs for part in good]), np.concatenate(targets) if targets else None, bad
    )


def write_cache(directory: Path, blocks: Iterable[TableBlock], layout: ColumnLayout, *, skip_bad_rows: bool) -> None:
    """Write the table as files that `load_cache` maps."""
    bad: list[Array] = [np.zeros(0, dtype=np.int64)]
    rows = 0
    with ExitStack() as files:
        inputs = files.enter_context(NpyWriter(directory / "inputs.npy"))
        target = files.enter_context(NpyWriter(directory / "target.npy"))
        for block in blocks:
            part = convert_block(block, layout, skip_bad_rows=skip_bad_rows)
            bad.append(np.flatnonzero(part.bad_rows) + rows)
            rows += len(part.bad_rows)
            if not part.bad_rows.all():
                good = part.good_rows()
                inputs.append(good.inputs)
                if good.target is not None:
                    target.append(good.target)
    np.save(directory / "bad.npy", np.concatenate(bad))


def load_cache(directory: Path, layout: ColumnLayout, *, where: str) -> LoadedTable:
    """Map the files that `write_cache` wrote."""
    inputs = directory / "inputs.npy"
    with reading_cache(directory):
        if inputs.stat().st_size == 0:
            raise error("SH302", "no good row", where=where)
        target = None if layout.target_type == "none" else np.load(directory / "target.npy", mmap_mode="r")
        return LoadedTable(np.load(inputs, mmap_mode="r"), target, np.load(directory / "bad.npy"))


def _check_widths(parts: list[ConvertedRows], where: str) -> None:
    widths = {part.inputs.shape[1] for part in parts}
    if len(widths) > 1:
        raise error("SH306", f"rows of different lengths: {sorted(widths)[:5]}", where=where)


def array_source(
    table: LoadedTable,
    layout: ColumnLayout,
    *,
    where: str,
    skipped_rows: int,
    names: tuple[str, ...],
    lookup: Callable[[str], Array],
) -> ArraySource:
    """`lookup` returns a column including its bad rows, which are removed here."""
    source = ArraySource(
        (_row_array(table.inputs, where),),
        None if table.target is None else _row_array(table.target, where),
        skipped_rows=skipped_rows,
        classes=layout.classes,
        encoders=layout.encoders,
        names=names,
        lookup=lambda name: np.delete(lookup(name), table.bad_rows),
    )
    source.input_columns = layout.inputs
    return source


def _row_array(array: Array, where: str) -> RowArray:
    return MemoryMappedRows(array, where) if isinstance(array, np.memmap) else InMemoryRows(array)
