"""CSV files. pyarrow splits them into text fields, block by block; this module decides the types.

pyarrow would infer types from the first block and fail on a later one. Here a column is numeric if most of its values
in the whole file are numbers, and rows with other values are bad rows.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
from pydantic import NonNegativeInt, TypeAdapter

from shoal.data.cache import SMALL_BYTES, cached_directory, reading_cache
from shoal.data.files import DataFile, find_files, local_path
from shoal.data.fitted import Fitted
from shoal.data.source import Array, SourceOptions
from shoal.data.sources.arrays import ArraySource
from shoal.data.sources.encoding import ColumnKind
from shoal.data.sources.hive import PartitionColumns
from shoal.data.sources.table import (
    ColumnLayout,
    choose_columns,
    column_chunks,
    fit_layout,
    saved_layout,
    tell_left_out,
)
from shoal.data.sources.table_cache import (
    LoadedTable,
    TableBlock,
    array_source,
    load_cache,
    load_in_memory,
    write_cache,
)
from shoal.data.sources.values import count_numbers, to_float32, to_numpy
from shoal.errors import ShoalError, did_you_mean, error, plural
from shoal.spec.sources.config import CsvSourceConfig

_SUFFIXES = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".csv.bz2", ".csv.zst")
PARQUET_MAGIC = b"PAR1"
_COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")
_COMPRESSION_RATIO = 5
_BLOCK_BYTES = 1 << 20


def open_csv(spec: CsvSourceConfig, options: SourceOptions) -> ArraySource:
    files = find_files(spec.path, options=options, suffixes=_SUFFIXES)
    reader = CsvReader(files, spec, options)
    if _uncompressed_bytes(files) <= SMALL_BYTES:
        schema, table = _load_in_memory(reader, spec, options)
    else:
        schema, table = _load_through_cache(reader, spec, options, key=[file.cache_key for file in files])

    layout = schema.layout(spec, options)
    tell_left_out(spec, schema.kinds, options)

    def lookup(name: str) -> Array:
        chunks = column_chunks((block.table for block in reader.blocks([name])), name)
        return _parse_column(chunks, schema.kinds[name], is_trained=name in layout.columns)

    return array_source(
        table,
        layout,
        where=spec.path,
        skipped_rows=len(table.bad_rows) + schema.misshapen,
        names=tuple(reader.names),
        lookup=lookup,
    )


@dataclass(frozen=True)
class CsvSchema:
    """Types, classes and encoders, which are known only after reading all rows."""

    kinds: dict[str, ColumnKind]
    fitted: Fitted
    misshapen: NonNegativeInt

    def layout(self, spec: CsvSourceConfig, options: SourceOptions) -> ColumnLayout:
        return saved_layout(_choose(spec, self.kinds, options), self.fitted)


def _choose(spec: CsvSourceConfig, kinds: dict[str, ColumnKind], options: SourceOptions) -> ColumnLayout:
    return choose_columns(spec, kinds, not_inputs=options.not_inputs, trained=options.input_columns, where=spec.path)


def _infer_schema(
    reader: CsvReader, loaded: list[TableBlock] | None, spec: CsvSourceConfig, options: SourceOptions
) -> CsvSchema:
    kinds = _column_kinds(loaded or reader.blocks(), reader.names)

    def read(name: str) -> Iterator[pa.Array]:
        blocks = loaded or reader.blocks([name])
        return column_chunks((block.table for block in blocks), name)

    layout = fit_layout(_choose(spec, kinds, options), spec, options, read=read)
    fitted = Fitted(classes=layout.classes, encoders=dict(layout.encoders))
    return CsvSchema(kinds, fitted, reader.malformed_rows)


def _load_in_memory(reader: CsvReader, spec: CsvSourceConfig, options: SourceOptions) -> tuple[CsvSchema, LoadedTable]:
    blocks = list(reader.blocks())
    schema = _infer_schema(reader, blocks, spec, options)
    layout = schema.layout(spec, options)
    return schema, load_in_memory(blocks, layout, skip_bad_rows=options.skip_bad_rows, where=spec.path)


def _load_through_cache(
    reader: CsvReader, spec: CsvSourceConfig, options: SourceOptions, *, key: list[Any]
) -> tuple[CsvSchema, LoadedTable]:
    def make(directory: Path) -> None:
        options.notify(f"reading {spec.path} into the cache in {options.cache_dir}, once")
        survey = _infer_schema(reader, None, spec, options)
        layout = survey.layout(spec, options)
        write_cache(directory, reader.blocks(layout.columns), layout, skip_bad_rows=options.skip_bad_rows)
        noted = {"kinds": survey.kinds, "fitted": survey.fitted.model_dump(mode="json"), "misshapen": survey.misshapen}
        (directory / "survey.json").write_text(json.dumps(noted))

    directory = cached_directory(
        options.cache_dir, ["csv", key, spec.model_dump(), options.on_bad_row, options.fitted, options.not_inputs], make
    )
    with reading_cache(directory):
        schema = TypeAdapter(CsvSchema).validate_json((directory / "survey.json").read_bytes())
        return schema, load_cache(directory, schema.layout(spec, options), where=spec.path)


def _uncompressed_bytes(files: list[DataFile]) -> int:
    return sum(f.size_bytes * (_COMPRESSION_RATIO if f.path.endswith(_COMPRESSED) else 1) for f in files)


class CsvReader:
    """The text fields of the files. `malformed_rows` counts the rows with a wrong number of fields in the last pass."""

    def __init__(self, files: Sequence[DataFile], spec: CsvSourceConfig, options: SourceOptions) -> None:
        self._paths = [local_path(file, options=options) for file in files]
        self._partitions = PartitionColumns(files, spec.path)
        self._spec = spec
        self._encoding = spec.encoding or "utf-8"
        self._skip_bad_rows = options.skip_bad_rows
        self.malformed_rows = 0
        header = self._header(self._paths[0])
        self._in_paths = tuple(name for name in self._partitions.names if name not in header)
        self.names = [*header, *self._in_paths]

    def blocks(self, columns: Sequence[str] | None = None) -> Iterator[TableBlock]:
        """All rows, or these columns of them."""
        self.malformed_rows = 0
        for file in range(len(self._paths)):
            yield from self._blocks(file, list(columns or self.names))

    def _blocks(self, file: int, columns: list[str]) -> Iterator[TableBlock]:
        path = self._paths[file]
        there = self._header(path)
        in_path = [name for name in columns if name in self._in_paths]
        columns = [name for name in columns if name not in in_path] or there[:1]
        for name in columns:
            if name not in there:
                raise error("SH303", f"no column '{name}'", where=path, fix=did_you_mean(name, there))
        wrong: list[pa_csv.InvalidRow] = []

        def on_wrong(row: pa_csv.InvalidRow) -> str:
            wrong.append(row)
            return "skip" if self._skip_bad_rows else "error"

        start = 0
        try:
            for batch in self._open(path, columns, on_wrong):
                table = pa.Table.from_batches([batch])
                for name in in_path:
                    words = pa.repeat(pa.scalar(self._partitions.words(name, file), pa.string()), table.num_rows)
                    table = table.append_column(name, words)
                yield TableBlock(table, lambda row, start=start: self._locate(path, start + row))  # type: ignore[misc]
                start += table.num_rows
        except pa.ArrowInvalid as failure:
            raise self._read_error(path, failure, wrong) from failure
        self.malformed_rows += len(wrong)
        if not start:
            raise error("SH302", "no rows", where=path)

    def _open(self, path: str, columns: list[str], on_wrong: object) -> pa_csv.CSVStreamingReader:
        return pa_csv.open_csv(
            path,
            # One thread: only then does pyarrow report the number of a row with too many or too few fields.
            read_options=pa_csv.ReadOptions(
                use_threads=False,
                block_size=_BLOCK_BYTES,
                autogenerate_column_names=not self._spec.header,
                encoding=self._encoding,
            ),
            parse_options=pa_csv.ParseOptions(
                delimiter=self._spec.delimiter, newlines_in_values=True, invalid_row_handler=on_wrong
            ),
            convert_options=pa_csv.ConvertOptions(
                column_types=dict.fromkeys(columns, pa.string()),
                include_columns=columns,
                null_values=[*pa_csv.ConvertOptions().null_values, *(self._spec.null_values or ())],
                strings_can_be_null=True,
            ),
        )

    def _read_error(self, path: str, failure: Exception, wrong: list[pa_csv.InvalidRow]) -> ShoalError:
        if wrong:
            row = wrong[-1]
            fields = f"{plural(row.expected_columns, 'field')} expected, {row.actual_columns} found"
            return error("SH304", fields, where=self._locate(path, row.number - 1 - self._spec.header))
        if "invalid UTF8" in str(failure):
            return self._encoding_error(str(failure), path)
        return error("SH307", str(failure), where=path)

    def _encoding_error(self, message: str, path: str) -> ShoalError:
        with pa.input_stream(path) as stream:
            first = stream.read(4)
        if first == PARQUET_MAGIC:
            return error("SH307", "it is a Parquet file", where=path, fix="Write `kind: parquet` in data.source.")
        other = "utf-16" if first[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "cp1252"
        fix = f"Write how its characters are stored in data.source: `encoding: {other}`, or save it as UTF-8."
        return error("SH307", f"{message}: it is no text in {self._encoding}", where=path, fix=fix)

    def _header(self, path: str) -> list[str]:
        first = next(self._records(path), (0, []))[1]
        if not first:
            raise error("SH302", "no rows", where=path)
        names = first if self._spec.header else [f"f{i}" for i in range(len(first))]
        if any("\ufffd" in name for name in names):
            raise self._encoding_error("the names of columns cannot be read", path)
        if len(names) == 1 and (fix := _fix_of_one_name(names[0])):
            raise error("SH307", f"the first line names one column: '{names[0]}'", where=f"{path}:1", fix=fix)
        if len(set(names)) < len(names):
            double = next(name for name in names if names.count(name) > 1)
            raise error("SH307", f"two columns are called '{double}'", where=f"{path}:1",
                        fix="Give every column a name of its own.")  # fmt: skip
        return names

    def _locate(self, path: str, row: int) -> str:
        """file:line of a row. Row and line numbers differ if fields contain line breaks or lines are empty."""
        for number, (line, _) in enumerate(self._records(path)):
            if number == row + self._spec.header:
                return f"{path}:{line}"
        return path

    def _records(self, path: str) -> Iterator[tuple[int, list[str]]]:
        with pa.input_stream(path) as stream:
            encoding = "utf-8-sig" if self._spec.encoding is None else self._encoding
            text = io.TextIOWrapper(stream, encoding=encoding, errors="replace", newline="")
            reader = csv.reader(text, delimiter=self._spec.delimiter)
            line = 1
            try:
                for record in reader:
                    if record:
                        yield line, record
                    line = reader.line_num + 1
            except (csv.Error, OSError) as failure:
                raise error("SH307", str(failure), where=f"{path}:{line}") from failure


def _fix_of_one_name(name: str) -> str:
    """What to do if the only name of a column is not meant as one; '' if it may be."""
    if name.startswith("#"):
        return "Delete the lines above the names of the columns."
    found = next((sign for sign in ";\t|" if sign in name), "")
    shown = found.replace("\t", "\\t")
    return f'The columns are separated by another sign: write `delimiter: "{shown}"` in data.source.' if found else ""


def _column_kinds(blocks: Iterable[TableBlock], names: Sequence[str]) -> dict[str, ColumnKind]:
    """The kind of most values of each column."""
    counts = {name: np.zeros(3, dtype=np.int64) for name in names}
    for block in blocks:
        for name in names:
            words = block.table.column(name)
            counts[name] += [len(words) - words.null_count, *count_numbers(words)]
    return {name: _column_kind(*count) for name, count in counts.items()}


def _column_kind(words: int, numbers: int, whole: int) -> ColumnKind:
    if not words:
        return "empty"
    if 2 * numbers <= words:
        return "text"
    return "int" if whole == numbers else "float"


def _parse_column(chunks: Iterable[pa.Array], kind: ColumnKind, *, is_trained: bool) -> Array:
    """A column for splits and samplers: integers, floats, times, or texts.

    A column of which only most values are numbers (ids such as 11cb48, 6214e9 and 103959) is a column of texts: as
    numbers, all other values would be one NaN. In an input or target these are bad rows, which the caller removes.
    """
    column = pa.chunked_array(list(chunks), type=pa.string()).combine_chunks()
    wanted = {"int": pa.int64(), "float": pa.float64()}.get(kind, pa.timestamp("us"))
    try:
        return to_numpy(column.cast(wanted))
    except pa.ArrowInvalid:
        numbers = None if kind == "text" else to_float32(column)
        is_number = numbers is not None and (is_trained or np.isnan(numbers).sum() <= column.null_count)
        return numbers if numbers is not None and is_number else to_numpy(column)
