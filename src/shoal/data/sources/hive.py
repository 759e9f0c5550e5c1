"""Columns in the names of directories, as Spark and Hive write partitions: sales/year=2024/part-0.parquet."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc

from shoal.data.files import DataFile
from shoal.errors import error

_NULL = "__HIVE_DEFAULT_PARTITION__"


class PartitionColumns:
    """The columns in the paths of these files, below the fixed part of `path`. Whole numbers are int64, dates are
    dates, anything else is text."""

    def __init__(self, files: Sequence[DataFile], path: str) -> None:
        words = [_partition_words(file.path, path) for file in files]
        self.names = tuple(words[0])
        for file, found in zip(files, words, strict=True):
            if tuple(found) != self.names:
                shown = "/".join(found) or "none"
                message = f"the directories name other columns ({shown}) than those of the first file"
                raise error("SH306", message, where=file.path, fix="Give every file the same partition columns.")
        self._columns = {name: _typed([found[name] for found in words]) for name in self.names}

    def type_of(self, name: str) -> pa.DataType:
        return self._columns[name].type

    def add(self, table: pa.Table, file: int, names: Sequence[str]) -> pa.Table:
        """The table of this file with these of its partition columns."""
        for name in names:
            value = self._columns[name][file]
            table = table.append_column(name, pa.repeat(value, table.num_rows))
        return table

    def words(self, name: str, file: int) -> str | None:
        """The value as text."""
        word: str | None = self._columns[name][file].cast(pa.string()).as_py()
        return word


def _partition_words(file: str, path: str) -> dict[str, str | None]:
    fixed = path.split("://", 1)[-1]
    parts = [part for part in fixed.split("/") if part not in ("", ".")]
    first_magic = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    starts = [parts[:first_magic]]
    if "://" in path:  # files of sftp:// and hdfs:// are named without their host
        starts.append(parts[1:first_magic])
    below = next(filter(None, (_below(file, start) for start in starts)), file.rsplit("/", 1)[-1])
    pairs = [part.split("=", 1) for part in below.split("/")[:-1] if "=" in part[1:]]
    return {unquote(name): None if word == _NULL else unquote(word) for name, word in pairs}


def _below(file: str, fixed: list[str]) -> str:
    """The part of a file's path after the directories that the job names; '' if they are not in it."""
    end = "/".join(part for part in fixed if part != "..")
    place = file.rfind(f"/{end}/") if end else -1
    return file[place + len(end) + 2 :] if place >= 0 else ""


def _typed(words: list[str | None]) -> pa.Array:
    column = pa.array(words, type=pa.string())
    for kind in (pa.int64(), pa.date32()):
        try:
            typed = column.cast(kind)
        except pa.ArrowInvalid:
            continue
        # 007 is no number: as text it would not come back.
        if pc.all(pc.equal(typed.cast(pa.string()), column)).as_py() in (True, None):
            return typed
    return column
