"""Stable 64-bit hashes of values and of samples: equal content gives an equal hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.batch import Batch
from shoal.data.permutation import Ids, random_words, splitmix64
from shoal.data.source import DataSource

Hashes = NDArray[np.uint64]

_CHUNK_BYTES = 4 << 20
_FIRST_ROWS = 64


def category_codes(values: NDArray[Any]) -> tuple[list[Any], Ids]:
    """The distinct values, and for each row the index of its value. Values need not be sortable."""
    if values.dtype != object:
        kinds, inverse = np.unique(values, return_inverse=True)
        return kinds.tolist(), inverse.reshape(-1).astype(np.int64)
    numbers: dict[Any, int] = {}
    found = [numbers.setdefault(value, len(numbers)) for value in values.tolist()]
    return list(numbers), np.array(found, dtype=np.int64)


def hash_values(values: NDArray[Any]) -> Hashes:
    """One hash per value of a column, of the number or of the text."""
    if values.dtype.kind in "biumM":
        return splitmix64(values.astype(np.int64).view(np.uint64))
    if values.dtype.kind == "f":
        return splitmix64((values.astype(np.float64) + 0.0).view(np.uint64))
    kinds, numbers = category_codes(values)
    return np.array([_hash_text(str(kind)) for kind in kinds], dtype=np.uint64)[numbers]


def _hash_text(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def hash_samples(source: DataSource, ids: Ids) -> Hashes:
    """One hash per sample, of the bytes of its inputs and target. Reads a few megabytes at a time."""
    out = np.empty(len(ids), dtype=np.uint64)
    start, rows = 0, _FIRST_ROWS
    while start < len(ids):
        batch = source.take(ids[start : start + rows])
        out[start : start + batch.size], size_bytes = _hash_batch(batch)
        start += batch.size
        rows = max(1, min(_CHUNK_BYTES * batch.size // max(size_bytes, 1), 1 << 16))
    return out


def _hash_batch(batch: Batch) -> tuple[Hashes, int]:
    """The hashes, and the number of bytes hashed."""
    digests = np.zeros(batch.size, dtype=np.uint64)
    size_bytes = 0
    for leaf in _leaves((batch.inputs, batch.target), batch.size):
        part = _hash_rows(leaf) if leaf.dtype == np.uint8 else leaf
        digests = splitmix64(digests ^ part)
        size_bytes += leaf.nbytes
    return digests, size_bytes


def _hash_rows(rows: NDArray[np.uint8]) -> Hashes:
    """A sum over the words of a row, each mixed with a key of its position."""
    padded = np.zeros((len(rows), -(-rows.shape[1] // 8) * 8), dtype=np.uint8)
    padded[:, : rows.shape[1]] = rows
    words = padded.view(np.uint64)
    keyed = words ^ random_words(words.shape[1], key=rows.shape[1])
    digests: Hashes = np.add.reduce(splitmix64(keyed), axis=1)
    return digests


def _leaves(value: Any, size: int) -> Iterator[NDArray[Any]]:
    """Per leaf of a batch: the bytes of the rows (uint8, size × n), or hashes if the rows are texts."""
    if isinstance(value, Tensor):
        yield value.detach().cpu().contiguous().reshape(size, -1).view(torch.uint8).numpy()
    elif isinstance(value, dict):
        for key in value:
            yield from _leaves(value[key], size)
    elif isinstance(value, list) and len(value) == size and all(isinstance(part, str) for part in value):
        yield hash_values(np.array(value, dtype=object))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _leaves(part, size)
