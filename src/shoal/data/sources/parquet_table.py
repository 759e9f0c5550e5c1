"""Rows in row groups. A small table is held, one of huge groups goes into the cache, others go by group."""

from __future__ import annotations

import json
from pathlib import Path

from shoal.data.cache import SMALL_BYTES, cached
from shoal.data.files import find_files, seekable
from shoal.data.source import Opening, Source
from shoal.data.sources.parquet_groups import ParquetGroups
from shoal.data.sources.parquet_rows import ParquetRows
from shoal.data.sources.stored import Stored, as_source, hold, load, write
from shoal.data.sources.table import Layout, choose, distinct, plain, values
from shoal.spec.data import ParquetSource

_SUFFIXES = (".parquet", ".pq", ".parq")
_HUGE_GROUP_BYTES = 32 << 20


def open_parquet(spec: ParquetSource, opening: Opening) -> Source:
    files = find_files(spec.path, opening=opening, suffixes=_SUFFIXES)
    table = ParquetRows([seekable(file, opening=opening) for file in files])
    layout = choose(spec, table.kinds, tokens=table.tokens, where=spec.path)
    group_bytes = [table.decoded_bytes(i, layout) for i in range(len(table.groups))]
    huge = sum(group_bytes) > SMALL_BYTES and max(group_bytes) > _HUGE_GROUP_BYTES
    if not huge:
        layout = _numbered(layout, table, opening)
        if sum(group_bytes) > SMALL_BYTES:
            return ParquetGroups(table, layout, skip=opening.skip)
        stored = hold(table.blocks(layout.used), layout, skip=opening.skip, where=spec.path)
    else:
        layout, stored = _store(table, layout, spec, opening)
    return as_source(
        stored,
        layout,
        where=spec.path,
        skipped=len(stored.bad),
        names=tuple(table.kinds),
        lookup=lambda name: values(table.column(name)),
    )


def _numbered(layout: Layout, table: ParquetRows, opening: Opening) -> Layout:
    """Classes take a pass over the target's column."""
    if layout.target_type != "class":
        return layout
    (target,) = layout.targets
    pieces = (plain(block.table.column(target)) for block in table.blocks([target]))
    return layout.numbered(opening.classes or distinct(pieces))


def _store(table: ParquetRows, layout: Layout, spec: ParquetSource, opening: Opening) -> tuple[Layout, Stored]:
    def make(directory: Path) -> None:
        opening.tell(f"{spec.path} has huge row groups: reading it into the cache in {opening.cache_dir}, once")
        numbered = _numbered(layout, table, opening)
        write(directory, table.blocks(numbered.used), numbered, skip=opening.skip)
        (directory / "classes.json").write_text(json.dumps(numbered.classes))

    files = [file.identity for file in table.files]
    key = ["parquet", files, spec.model_dump(), opening.on_bad_row, opening.classes]
    directory = cached(opening.cache_dir, key, make)
    classes = json.loads((directory / "classes.json").read_text())
    layout = layout if classes is None else layout.numbered(tuple(classes))
    return layout, load(directory, layout, where=spec.path)
