"""Open a Parquet table: small tables in memory, tables with huge row groups in the cache, others group by group."""

from __future__ import annotations

import json
from pathlib import Path

from shoal.data.cache import SMALL_BYTES, cached_directory
from shoal.data.files import ensure_seekable, find_files
from shoal.data.source import DataSource, SourceOptions
from shoal.data.sources.parquet_groups import ParquetRowGroupSource
from shoal.data.sources.parquet_rows import ParquetReader
from shoal.data.sources.table import ColumnLayout, choose_columns, distinct_values, to_numpy, to_plain_array
from shoal.data.sources.table_cache import LoadedTable, array_source, load_cache, load_in_memory, write_cache
from shoal.spec.data import ParquetSourceConfig

_SUFFIXES = (".parquet", ".pq", ".parq")
_HUGE_GROUP_BYTES = 32 << 20


def open_parquet(spec: ParquetSourceConfig, options: SourceOptions) -> DataSource:
    files = find_files(spec.path, options=options, suffixes=_SUFFIXES)
    reader = ParquetReader([ensure_seekable(file, options=options) for file in files])
    layout = choose_columns(spec, reader.kinds, token_columns=reader.token_columns, where=spec.path)
    group_bytes = [reader.decoded_bytes(i, layout) for i in range(len(reader.groups))]
    huge = sum(group_bytes) > SMALL_BYTES and max(group_bytes) > _HUGE_GROUP_BYTES
    if not huge:
        layout = _with_classes(layout, reader, options)
        if sum(group_bytes) > SMALL_BYTES:
            return ParquetRowGroupSource(reader, layout, skip_bad_rows=options.skip_bad_rows)
        loaded = load_in_memory(
            reader.blocks(layout.columns), layout, skip_bad_rows=options.skip_bad_rows, where=spec.path
        )
    else:
        layout, loaded = _load_through_cache(reader, layout, spec, options)
    return array_source(
        loaded,
        layout,
        where=spec.path,
        skipped_rows=len(loaded.bad_rows),
        names=tuple(reader.kinds),
        lookup=lambda name: to_numpy(reader.column(name)),
    )


def _with_classes(layout: ColumnLayout, reader: ParquetReader, options: SourceOptions) -> ColumnLayout:
    """The layout with classes, which need a pass over the target column."""
    if layout.target_type != "class":
        return layout
    (target,) = layout.targets
    pieces = (to_plain_array(block.table.column(target)) for block in reader.blocks([target]))
    return layout.with_classes(options.classes or distinct_values(pieces))


def _load_through_cache(
    reader: ParquetReader, layout: ColumnLayout, spec: ParquetSourceConfig, options: SourceOptions
) -> tuple[ColumnLayout, LoadedTable]:
    def make(directory: Path) -> None:
        options.notify(f"{spec.path} has huge row groups: reading it into the cache in {options.cache_dir}, once")
        numbered = _with_classes(layout, reader, options)
        write_cache(directory, reader.blocks(numbered.columns), numbered, skip_bad_rows=options.skip_bad_rows)
        (directory / "classes.json").write_text(json.dumps(numbered.classes))

    files = [file.cache_key for file in reader.files]
    key = ["parquet", files, spec.model_dump(), options.on_bad_row, options.classes]
    directory = cached_directory(options.cache_dir, key, make)
    classes = json.loads((directory / "classes.json").read_text())
    layout = layout if classes is None else layout.with_classes(tuple(classes))
    return layout, load_cache(directory, layout, where=spec.path)
