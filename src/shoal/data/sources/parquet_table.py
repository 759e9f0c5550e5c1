"""Open a Parquet table: small tables in memory, tables with huge row groups in the cache, others group by group."""

from __future__ import annotations

from pathlib import Path

from shoal.data.cache import SMALL_BYTES, cached_directory, reading_cache
from shoal.data.files import ensure_seekable, find_files
from shoal.data.fitted import Fitted
from shoal.data.source import DataSource, SourceOptions
from shoal.data.sources.parquet_groups import ParquetRowGroupSource
from shoal.data.sources.parquet_rows import ParquetReader
from shoal.data.sources.table import (
    ColumnLayout,
    choose_columns,
    column_chunks,
    fit_layout,
    saved_layout,
    tell_left_out,
)
from shoal.data.sources.table_cache import LoadedTable, array_source, load_cache, load_in_memory, write_cache
from shoal.data.sources.values import to_numpy
from shoal.spec.sources.config import ParquetSourceConfig

_SUFFIXES = (".parquet", ".pq", ".parq")
_HUGE_GROUP_BYTES = 32 << 20


def open_parquet(spec: ParquetSourceConfig, options: SourceOptions) -> DataSource:
    files = find_files(spec.path, options=options, suffixes=_SUFFIXES)
    reader = ParquetReader([ensure_seekable(file, options=options) for file in files], spec.path)
    layout = choose_columns(
        spec,
        reader.kinds,
        not_inputs=options.not_inputs,
        trained=options.input_columns,
        token_columns=reader.token_columns,
        where=spec.path,
    )
    tell_left_out(spec, reader.kinds, options)
    group_bytes = [reader.decoded_bytes(i, layout) for i in range(len(reader.groups))]
    huge = sum(group_bytes) > SMALL_BYTES and max(group_bytes) > _HUGE_GROUP_BYTES
    if not huge:
        layout = _fitted(layout, reader, spec, options)
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


def _fitted(
    layout: ColumnLayout, reader: ParquetReader, spec: ParquetSourceConfig, options: SourceOptions
) -> ColumnLayout:
    """The layout with classes and encoders, which need a pass over their columns."""
    return fit_layout(
        layout, spec, options, read=lambda name: column_chunks((b.table for b in reader.blocks([name])), name)
    )


def _load_through_cache(
    reader: ParquetReader, layout: ColumnLayout, spec: ParquetSourceConfig, options: SourceOptions
) -> tuple[ColumnLayout, LoadedTable]:
    def make(directory: Path) -> None:
        options.notify(f"{spec.path} has huge row groups: reading it into the cache in {options.cache_dir}, once")
        numbered = _fitted(layout, reader, spec, options)
        write_cache(directory, reader.blocks(numbered.columns), numbered, skip_bad_rows=options.skip_bad_rows)
        fitted = Fitted(classes=numbered.classes, encoders=dict(numbered.encoders))
        (directory / "fitted.json").write_text(fitted.model_dump_json())

    files = [file.cache_key for file in reader.files]
    key = ["parquet", files, spec.model_dump(), options.on_bad_row, options.fitted, options.not_inputs]
    directory = cached_directory(options.cache_dir, key, make)
    with reading_cache(directory):
        layout = saved_layout(layout, Fitted.model_validate_json((directory / "fitted.json").read_text()))
        return layout, load_cache(directory, layout, where=spec.path)
