"""Rows in a checkpoint: servers write them, one blob per piece, beside the workers' files.

A blob has the keys and the floats of each table. Its description in the manifest is plain data, checked before use.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from shoal.checkpoint.blobs import TensorSpec, decode_blob, encode_blob
from shoal.checkpoint.files import CheckpointFiles
from shoal.checkpoint.manifest import blob_path
from shoal.checkpoint.tensor_bytes import DTYPE_CODES
from shoal.errors import error
from shoal.lanes.sparse.rows import RowBundle, SparseRows, check_keys
from shoal.lanes.sparse.table_spec import TableSpec
from shoal.paramserver.sparse.row_tables import CURRENT

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class RowBlob:
    """A blob with the rows of the chunks [first, last), `counts[i]` of table i. ValueError for invalid values."""

    blob: str
    size_bytes: int
    first: int
    last: int
    counts: list[int]

    def __post_init__(self) -> None:
        numbers = [self.size_bytes, self.first, self.last, *self.counts]
        if any(type(number) is not int or not 0 <= number < 1 << 63 for number in numbers):
            raise ValueError("the description of saved rows has invalid numbers")
        if not isinstance(self.blob, str) or not _DIGEST.fullmatch(self.blob):
            raise ValueError("the description of saved rows names no blob")

    def describe(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_description(cls, description: Any) -> RowBlob:
        try:
            return cls(**description)
        except TypeError as problem:
            raise ValueError(f"not a description of saved rows: {problem!r:.200}") from None


def save_rows(files: CheckpointFiles, contents: Sequence[SparseRows], first: int, last: int) -> RowBlob:
    """Write the rows of these chunks, by table. OSError if that fails."""
    tensors = {}
    for number, rows in enumerate(contents):
        tensors[f"keys/{number}"] = torch.from_numpy(rows.keys)
        tensors[f"rows/{number}"] = torch.from_numpy(rows.values)
    blob = encode_blob(tensors)
    files.write(blob_path(blob.digest), blob.chunks)
    return RowBlob(blob.digest, blob.size_bytes, first, last, [len(rows) for rows in contents])


def load_rows(
    files: CheckpointFiles, saved: Iterable[RowBlob], tables: Sequence[TableSpec], first: int, last: int
) -> list[RowBundle]:
    """All rows of the chunks [first, last), from all blobs. SH502 if anything is missing or damaged."""
    found = []
    for one in saved:
        if one.first < last and first < one.last:
            for number, rows in enumerate(_read_blob(files, one, tables)):
                check_keys(rows.keys, (one.first, one.last))
                found.append(RowBundle(CURRENT, number, rows.in_chunks(first, last)))
    return found


def _read_blob(files: CheckpointFiles, saved: RowBlob, tables: Sequence[TableSpec]) -> list[SparseRows]:
    where = f"{files.where.rstrip('/')}/{blob_path(saved.blob)}"
    specs: dict[str, TensorSpec] = {}
    for table, count in zip(tables, saved.counts, strict=True):
        specs[f"keys/{table.number}"] = (DTYPE_CODES[torch.int64], (count,))
        specs[f"rows/{table.number}"] = (DTYPE_CODES[torch.float32], (count, table.width))
    try:
        with files.open(blob_path(saved.blob)) as file:
            tensors = decode_blob(file, specs, digest=saved.blob, where=where)
    except OSError as problem:
        raise error("SH502", f"saved rows cannot be read: {problem}", where=where) from problem
    return [SparseRows(tensors[f"keys/{t.number}"].numpy(), tensors[f"rows/{t.number}"].numpy()) for t in tables]
