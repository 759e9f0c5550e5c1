"""Parquet files as one table: their metadata, and their rows group by group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shoal.data.files import DataFile, wrap_file_errors
from shoal.data.sources.encoding import ColumnKind
from shoal.data.sources.hive import PartitionColumns
from shoal.data.sources.table import ColumnLayout
from shoal.data.sources.table_cache import TableBlock
from shoal.data.sources.values import is_list, to_plain_array
from shoal.errors import error

_BLOCK_ROWS = 1 << 16


@dataclass(frozen=True)
class RowGroup:
    """A row group of one of the files."""

    file: int
    number: int
    rows: int


class ParquetReader:
    """The files of a table. No file stays open, so threads and forks cannot interfere."""

    def __init__(self, files: list[DataFile], path: str) -> None:
        self.files = files
        self._footers = [_read_footer(file) for file in files]
        self._fields = flat_fields(self._footers[0].schema.to_arrow_schema())
        self._partitions = PartitionColumns(files, path)
        self.groups = [
            RowGroup(i, g, footer.row_group(g).num_rows)
            for i, footer in enumerate(self._footers)
            for g in range(footer.num_row_groups)
            if footer.row_group(g).num_rows
        ]
        if not self.groups:
            raise error("SH302", "no rows", where=files[0].path)
        self.kinds: dict[str, ColumnKind] = {name: _column_kind(kind) for name, kind in self._fields.items()}
        self._in_paths = tuple(name for name in self._partitions.names if name not in self._fields)
        self.kinds |= {name: _column_kind(self._partitions.type_of(name)) for name in self._in_paths}
        self.token_columns = [
            name for name, kind in self._fields.items() if is_list(kind) and _column_kind(kind.value_type) == "int"
        ]
        self._check_schemas()

    def blocks(self, columns: Sequence[str]) -> Iterator[TableBlock]:
        """The rows in blocks of bounded size."""
        for index, group in enumerate(self.groups):
            start = 0
            for piece in self._pieces(group, columns):
                yield TableBlock(piece, lambda row, i=index, s=start: self.locate(i, s + row))  # type: ignore[misc]
                start += piece.num_rows

    def read_group(self, index: int, columns: Sequence[str]) -> pa.Table:
        group = self.groups[index]
        in_file = self._in_file(columns)
        with self._open_group(group) as file:
            table = file.read_row_group(group.number, columns=in_file, use_threads=False)
        return self._complete(table, group, columns)

    def _pieces(self, group: RowGroup, columns: Sequence[str]) -> Iterator[pa.Table]:
        in_file = self._in_file(columns)
        if not in_file:  # Parquet gives no rows without columns
            yield self._complete(pa.table({"": pa.nulls(group.rows)}), group, columns)
            return
        with self._open_group(group) as file:
            options = {"row_groups": [group.number], "columns": in_file, "use_threads": False}
            for piece in file.iter_batches(_BLOCK_ROWS, **options):
                yield self._complete(pa.Table.from_batches([piece]), group, columns)

    def _in_file(self, columns: Sequence[str]) -> list[str]:
        return [name for name in columns if name not in self._in_paths]

    def _complete(self, table: pa.Table, group: RowGroup, columns: Sequence[str]) -> pa.Table:
        """The rows with fields of structs as columns, and with the columns that stand in the path."""
        while any(pa.types.is_struct(field.type) for field in table.schema):
            table = table.flatten()
        wanted = [name for name in columns if name in self._in_paths]
        if wanted and not table.num_columns:
            table = pa.table({"": pa.nulls(group.rows)})
        return self._partitions.add(table, group.file, wanted) if wanted else table

    def column(self, name: str) -> pa.ChunkedArray:
        chunks = [to_plain_array(self.read_group(i, [name]).column(name)) for i in range(len(self.groups))]
        return pa.chunked_array(chunks)

    def locate(self, index: int, row: int) -> str:
        group = self.groups[index]
        return f"{self.files[group.file].path}, row group {group.number}, row {row}"

    def decoded_bytes(self, index: int, layout: ColumnLayout) -> int:
        """Size of a group as arrays. The length of lists is estimated from their bytes in the file."""
        group = self.groups[index]
        footer = self._footers[group.file].row_group(group.number)
        lists = tuple(f"{name}." for name in layout.columns if self.kinds[name] == "list")
        parts = [footer.column(i) for i in range(footer.num_columns)]
        in_file = sum(p.total_uncompressed_size for p in parts if f"{p.path_in_schema}.".startswith(lists))
        return int(in_file + 4 * group.rows * (len(layout.columns) - len(lists)))

    def has_nulls(self, index: int, names: Sequence[str]) -> bool:
        """Whether the file's metadata reports missing values in these columns."""
        group = self.groups[index]
        footer = self._footers[group.file].row_group(group.number)
        parts = [footer.column(i) for i in range(footer.num_columns)]
        return any(p.statistics.null_count for p in parts if p.path_in_schema in names and p.statistics)

    @contextmanager
    def _open_group(self, group: RowGroup) -> Iterator[pq.ParquetFile]:
        file = self.files[group.file]
        with _wrap_read_errors(file), _open(file) as raw:
            yield pq.ParquetFile(raw, metadata=self._footers[group.file], pre_buffer=True)

    def _check_schemas(self) -> None:
        for file, footer in zip(self.files, self._footers, strict=True):
            fields = flat_fields(footer.schema.to_arrow_schema())
            other = {name: _column_kind(kind) for name, kind in fields.items()}
            for name in self._fields:
                kind = self.kinds[name]
                if name not in other:
                    raise error("SH303", f"no column '{name}', which the other files have", where=file.path)
                if other[name] != kind:
                    raise error("SH310", f"column '{name}' is {other[name]} here, {kind} elsewhere", where=file.path)


def flat_fields(schema: pa.Schema) -> dict[str, pa.DataType]:
    """Names and types of columns. A field `b` of a struct `a` is the column `a.b`."""
    fields = [(field.name, field.type) for field in schema]
    while any(pa.types.is_struct(kind) for _, kind in fields):
        fields = [
            (f"{name}.{part.name}", part.type) if part is not None else (name, kind)
            for name, kind in fields
            for part in (kind if pa.types.is_struct(kind) else [None])
        ]
    return dict(fields)


@contextmanager
def _open(file: DataFile) -> Iterator[Any]:
    with wrap_file_errors(file.path):
        raw = pa.OSFile(file.path, "rb") if file.fs is None else file.fs.open(file.path, "rb")
    with raw:
        yield raw


@contextmanager
def _wrap_read_errors(file: DataFile) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, EOFError) as failure:
        raise error("SH307", f"cannot be read as Parquet: {failure}", where=file.path) from failure


def _read_footer(file: DataFile) -> pq.FileMetaData:
    with _wrap_read_errors(file), _open(file) as raw:
        return pq.read_metadata(raw)


def _column_kind(kind: pa.DataType) -> ColumnKind:
    if pa.types.is_dictionary(kind):
        return _column_kind(kind.value_type)
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return "int"
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "float"
    if is_list(kind):
        return "list" if _column_kind(kind.value_type) in ("int", "float") else "other"
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind) or pa.types.is_time(kind):
        return "time"
    return "text" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else "other"
