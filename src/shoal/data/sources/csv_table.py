"""Rows of text. pyarrow splits them into words, block by block; what the words mean is decided here.

Types are not left to pyarrow, which infers them from the first block and then fails later on: here a
column is of numbers when most of its values in the whole file are, and the others are bad rows.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from shoal.data.cache import SMALL_BYTES, cached
from shoal.data.files import File, find_files, local_path
from shoal.data.source import Array, Opening
from shoal.data.sources.arrays import Arrays
from shoal.data.sources.stored import Block, Stored, as_source, hold, load, write
from shoal.data.sources.table import Kind, Layout, choose, chunks_of, count_numbers, distinct, floats, values
from shoal.errors import ShoalError, did_you_mean, error
from shoal.spec.data import CsvSource

_SUFFIXES = (".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".csv.bz2", ".csv.zst")
_PACKED = (".gz", ".bz2", ".zst", ".lz4")
_PACKED_RATIO = 5
_BLOCK_BYTES = 1 << 20


def open_csv(spec: CsvSource, opening: Opening) -> Arrays:
    files = find_files(spec.path, opening=opening, suffixes=_SUFFIXES)
    rows = CsvRows([local_path(file, opening=opening) for file in files], spec, skip=opening.skip)
    if _unpacked_bytes(files) <= SMALL_BYTES:
        survey, stored = _hold(rows, spec, opening)
    else:
        survey, stored = _store(rows, spec, opening, key=[file.identity for file in files])

    def lookup(name: str) -> Array:
        return _column(chunks_of((block.table for block in rows.blocks([name])), name), survey.kinds[name])

    return as_source(
        stored,
        survey.layout(spec),
        where=spec.path,
        skipped=len(stored.bad) + survey.misshapen,
        names=tuple(rows.names),
        lookup=lookup,
    )


@dataclass(frozen=True)
class Survey:
    """What only a look at all rows tells."""

    kinds: dict[str, Kind]
    classes: tuple[str, ...] | None
    misshapen: int

    def layout(self, spec: CsvSource) -> Layout:
        layout = choose(spec, self.kinds, where=spec.path)
        return layout if self.classes is None else layout.numbered(self.classes)


def _survey(rows: CsvRows, held: list[Block] | None, spec: CsvSource, opening: Opening) -> Survey:
    kinds = _kinds(held or rows.blocks(), rows.names)
    layout = choose(spec, kinds, where=spec.path)
    classes = None
    if layout.target_type == "class":
        (target,) = layout.targets
        blocks = held or rows.blocks([target])
        classes = opening.classes or distinct(chunks_of((block.table for block in blocks), target))
    return Survey(kinds, classes, rows.misshapen)


def _hold(rows: CsvRows, spec: CsvSource, opening: Opening) -> tuple[Survey, Stored]:
    blocks = list(rows.blocks())
    survey = _survey(rows, blocks, spec, opening)
    return survey, hold(blocks, survey.layout(spec), skip=opening.skip, where=spec.path)


def _store(rows: CsvRows, spec: CsvSource, opening: Opening, *, key: list[Any]) -> tuple[Survey, Stored]:
    def make(directory: Path) -> None:
        opening.tell(f"reading {spec.path} into the cache in {opening.cache_dir}, once")
        survey = _survey(rows, None, spec, opening)
        layout = survey.layout(spec)
        write(directory, rows.blocks(layout.used), layout, skip=opening.skip)
        (directory / "survey.json").write_text(json.dumps(asdict(survey)))

    directory = cached(opening.cache_dir, ["csv", key, spec.model_dump(), opening.on_bad_row, opening.classes], make)
    noted = json.loads((directory / "survey.json").read_text())
    classes = None if noted["classes"] is None else tuple(noted["classes"])
    survey = Survey(noted["kinds"], classes, noted["misshapen"])
    return survey, load(directory, survey.layout(spec), where=spec.path)


def _unpacked_bytes(files: list[File]) -> int:
    return sum(f.size_bytes * (_PACKED_RATIO if f.path.endswith(_PACKED) else 1) for f in files)


class CsvRows:
    """The words of some files. `misshapen` counts the rows with a wrong number of fields in the last pass."""

    def __init__(self, paths: Sequence[str], spec: CsvSource, *, skip: bool) -> None:
        self._paths = paths
        self._spec = spec
        self._skip = skip
        self.misshapen = 0
        self.names = self._header(paths[0])

    def blocks(self, columns: Sequence[str] | None = None) -> Iterator[Block]:
        """All rows, or these columns of them."""
        self.misshapen = 0
        for path in self._paths:
            yield from self._blocks(path, list(columns or self.names))

    def _blocks(self, path: str, columns: list[str]) -> Iterator[Block]:
        there = self._header(path)
        for name in columns:
            if name not in there:
                raise error("SH303", f"no column '{name}'", where=path, fix=did_you_mean(name, there))
        wrong: list[pa_csv.InvalidRow] = []

        def on_wrong(row: pa_csv.InvalidRow) -> str:
            wrong.append(row)
            return "skip" if self._skip else "error"

        start = 0
        try:
            for table in self._open(path, columns, on_wrong):
                yield Block(table, lambda row, start=start: self._place(path, start + row))  # type: ignore[misc]
                start += table.num_rows
        except pa.ArrowInvalid as failure:
            raise self._unreadable(path, failure, wrong) from failure
        self.misshapen += len(wrong)
        if not start:
            raise error("SH302", "no rows", where=path)

    def _open(self, path: str, columns: list[str], on_wrong: object) -> pa_csv.CSVStreamingReader:
        return pa_csv.open_csv(
            path,
            # One thread: only then does pyarrow know the number of a row with too many or too few fields.
            read_options=pa_csv.ReadOptions(
                use_threads=False, block_size=_BLOCK_BYTES, autogenerate_column_names=not self._spec.header
            ),
            parse_options=pa_csv.ParseOptions(
                delimiter=self._spec.delimiter, newlines_in_values=True, invalid_row_handler=on_wrong
            ),
            convert_options=pa_csv.ConvertOptions(
                column_types=dict.fromkeys(columns, pa.string()),
                include_columns=columns,
                strings_can_be_null=True,
            ),
        )

    def _unreadable(self, path: str, failure: Exception, wrong: list[pa_csv.InvalidRow]) -> ShoalError:
        if wrong:
            row = wrong[-1]
            fields = f"{row.expected_columns} fields expected, {row.actual_columns} found"
            return error("SH304", fields, where=self._place(path, row.number - 1 - self._spec.header))
        return error("SH307", str(failure), where=path)

    def _header(self, path: str) -> list[str]:
        first = next(self._records(path), (0, []))[1]
        if not first:
            raise error("SH302", "no rows", where=path)
        names = first if self._spec.header else [f"f{i}" for i in range(len(first))]
        if len(set(names)) < len(names):
            double = next(name for name in names if names.count(name) > 1)
            raise error("SH307", f"two columns are called '{double}'", where=f"{path}:1",
                        fix="Give every column a name of its own.")  # fmt: skip
        return names

    def _place(self, path: str, row: int) -> str:
        """file:line of a row. Rows and lines differ where fields hold line ends or lines are empty."""
        for number, (line, _) in enumerate(self._records(path)):
            if number == row + self._spec.header:
                return f"{path}:{line}"
        return path

    def _records(self, path: str) -> Iterator[tuple[int, list[str]]]:
        with pa.input_stream(path) as stream:
            text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace", newline="")
            reader = csv.reader(text, delimiter=self._spec.delimiter)
            line = 1
            try:
                for record in reader:
                    if record:
                        yield line, record
                    line = reader.line_num + 1
            except (csv.Error, OSError) as failure:
                raise error("SH307", str(failure), where=f"{path}:{line}") from failure


def _kinds(blocks: Iterable[Block], names: Sequence[str]) -> dict[str, Kind]:
    """What most values of each column are."""
    counts = {name: np.zeros(3, dtype=np.int64) for name in names}
    for block in blocks:
        for name in names:
            words = block.table.column(name)
            counts[name] += [len(words) - words.null_count, *count_numbers(words)]
    return {name: _kind(*count) for name, count in counts.items()}


def _kind(words: int, numbers: int, whole: int) -> Kind:
    if not words:
        return "empty"
    if 2 * numbers <= words:
        return "text"
    return "int" if whole == numbers else "float"


def _column(chunks: Iterable[pa.Array], kind: Kind) -> Array:
    """A column for splits and dealing: whole numbers, floats, times, or words."""
    column = pa.chunked_array(list(chunks), type=pa.string()).combine_chunks()
    wanted = {"int": pa.int64(), "float": pa.float64()}.get(kind, pa.timestamp("us"))
    try:
        return values(column.cast(wanted))
    except pa.ArrowInvalid:
        return values(column) if kind == "text" else floats(column)
