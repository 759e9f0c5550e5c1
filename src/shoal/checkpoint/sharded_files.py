"""Pieces of tensors in a checkpoint: each rank writes the pieces that it owns and reads the pieces that it needs.

Each written piece is described by a `PieceRecord`, which is checked before use. A large piece is a blob of its own, so
a rank that needs some of it reads and verifies only that blob.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.blobs import TensorSpec, decode_blob, pack_tensors
from shoal.checkpoint.files import CheckpointFiles
from shoal.checkpoint.manifest import Manifest, blob_path
from shoal.checkpoint.slices import TensorPiece, TensorSlice
from shoal.checkpoint.tensor_bytes import DTYPES
from shoal.errors import error

PIECES_SECTION = "pieces"
"""The section of a checkpoint's state that lists the pieces."""
NAMES_SECTION = "names"
"""The section that maps each name of the model's state dict to the name under which its pieces are stored."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_SIZE = 1 << 62


@dataclass(frozen=True)
class PieceRecord:
    """One piece: its tensor, its block of that tensor, and the blob that holds it. ValueError if that is impossible."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    blob: str
    key: str
    dtype: str

    def __post_init__(self) -> None:
        for numbers in (self.shape, self.start, self.size):
            if len(numbers) != len(self.shape) or any(type(n) is not int or not 0 <= n < _MAX_SIZE for n in numbers):
                raise ValueError("a saved piece has a size or offset that is not a valid whole number")
        if any(a + n > whole for a, n, whole in zip(self.start, self.size, self.shape, strict=True)):
            raise ValueError("a saved piece is not inside its tensor")
        if not all(isinstance(word, str) for word in (self.name, self.key, self.dtype)):
            raise ValueError("a saved piece has no name")
        if not isinstance(self.blob, str) or not _DIGEST.fullmatch(self.blob):
            raise ValueError("a saved piece names no blob")

    @property
    def tensor_slice(self) -> TensorSlice:
        return TensorSlice(self.shape, self.start, self.size)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, description: Any) -> PieceRecord:
        try:
            numbers = {key: tuple(description[key]) for key in ("shape", "start", "size")}
            return cls(**{**description, **numbers})
        except (KeyError, TypeError) as problem:
            raise ValueError(f"not the record of a saved piece: {problem!r:.200}") from None


def write_pieces(files: CheckpointFiles, pieces: Mapping[str, TensorPiece]) -> tuple[list[PieceRecord], dict[str, int]]:
    """Write pieces. Returns their records, and the blobs with their sizes. OSError if writing fails."""
    blobs, refs = pack_tensors({name: piece.values.contiguous() for name, piece in pieces.items()})
    for blob in blobs.values():
        files.write(blob_path(blob.digest), blob.chunks)
    records = [
        PieceRecord(
            name,
            piece.tensor_slice.shape,
            piece.tensor_slice.start,
            piece.tensor_slice.size,
            refs[name].blob,
            refs[name].key,
            refs[name].dtype,
        )
        for name, piece in pieces.items()
    ]
    return records, {blob.digest: blob.size_bytes for blob in blobs.values()}


class SavedPieces:
    """The pieces that all ranks have written. Caches blobs that several small pieces share, but no large ones."""

    def __init__(self, files: CheckpointFiles, records: Iterable[PieceRecord]) -> None:
        self._files = files
        self._records: dict[str, list[PieceRecord]] = defaultdict(list)
        self._specs: dict[str, dict[str, TensorSpec]] = defaultdict(dict)
        for row in records:
            self._records[row.name].append(row)
            self._specs[row.blob][row.key] = (row.dtype, row.size)
        self._shared_blobs: dict[str, dict[str, Tensor]] = {}

    def names(self) -> Iterable[str]:
        return self._records

    def slices(self, name: str) -> list[TensorSlice]:
        return [row.tensor_slice for row in self._records.get(name, ())]

    def spec(self, name: str) -> TensorSpec:
        """Dtype and shape of the full tensor. SH502 if no piece of it was saved."""
        if not self._records.get(name):
            raise error("SH502", f"'{name}' was not saved", where=self._files.where)
        row = self._records[name][0]
        return row.dtype, row.shape

    def read(self, name: str, number: int) -> Tensor:
        """The values of one piece. SH502 if it is damaged or missing."""
        row = self._records[name][number]
        content = self._shared_blobs.get(row.blob) or self._read_blob(row.blob)
        if len(content) > 1:
            self._shared_blobs[row.blob] = content
        return content[row.key]

    def _read_blob(self, digest: str) -> dict[str, Tensor]:
        where = f"{self._files.where.rstrip('/')}/{blob_path(digest)}"
        try:
            with self._files.open(blob_path(digest)) as file:
                return decode_blob(file, self._specs[digest], digest=digest, where=where)
        except OSError as problem:
            raise error("SH502", f"saved pieces cannot be read: {problem}", where=where) from problem


def open_pieces(files: CheckpointFiles, state: Mapping[str, Any]) -> SavedPieces:
    """The pieces of a state that several ranks wrote. SH502 if the state does not list them."""
    try:
        return SavedPieces(files, [PieceRecord.from_dict(row) for row in state[PIECES_SECTION]])
    except (KeyError, TypeError, ValueError) as problem:
        raise error("SH502", f"the list of pieces in the checkpoint is damaged: {problem}") from None


def open_full_tensors(files: CheckpointFiles, manifest: Manifest, *, rename: Callable[[str], str]) -> SavedPieces:
    """The tensors of a state that one worker wrote, as pieces: each is one full piece, under its new name."""

    def row(name: str) -> PieceRecord:
        ref = manifest.tensors[name]
        return PieceRecord(rename(name), ref.shape, (0,) * len(ref.shape), ref.shape, ref.blob, ref.key, ref.dtype)

    return SavedPieces(files, map(row, manifest.tensors))


class AssembledTensors(Mapping[str, Tensor]):
    """Full tensors, each assembled from its pieces on access. `names` maps each tensor to the name of its pieces."""

    def __init__(self, pieces: SavedPieces, names: Mapping[str, str]) -> None:
        self._pieces = pieces
        self._names = names

    def __getitem__(self, name: str) -> Tensor:
        found = self._names[name]
        code, shape = self.spec(name)
        whole = torch.empty(shape, dtype=DTYPES[code])
        count = 0
        for number, box in enumerate(self._pieces.slices(found)):
            box.view_of(whole).copy_(self._pieces.read(found, number))
            count += box.view_of(whole).numel()
        if count != whole.numel():
            raise error("SH502", f"{count} of {whole.numel()} values of '{name}' were saved")
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def spec(self, name: str) -> TensorSpec:
        """Dtype and shape, without reading the tensor."""
        return self._pieces.spec(self._names[name])
