"""A row's key and its initial values: pure functions of its id, the same on every machine.

A key is the row's chunk followed by its id, so the rows of a chunk are contiguous by key.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Keys = NDArray[np.int64]
Floats = NDArray[np.float32]

ID_BITS = 48
MAX_ROWS = 1 << ID_BITS
MAX_CHUNKS = 1 << 14
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


def splitmix64(words: Words) -> Words:
    """A bijection in which every bit depends on every bit (the finaliser of SplitMix64)."""
    words = words ^ (words >> np.uint64(30))
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def keys_of(ids: Keys, *, table: int, chunks: int) -> Keys:
    """The keys of rows of a table, which are spread over this many chunks."""
    spread = splitmix64(ids.view(np.uint64) + _salt(table)) % np.uint64(chunks)
    return (spread.view(np.int64) << ID_BITS) | ids


def ids_of(keys: Keys) -> Keys:
    return keys & (MAX_ROWS - 1)


def chunks_of(keys: Keys) -> Keys:
    return keys >> ID_BITS


def first_key(chunk: int) -> int:
    """The lowest key of a chunk."""
    return chunk << ID_BITS


def initial_rows(ids: Keys, *, table: int, dim: int, seed: int, scale: float) -> Floats:
    """Initial values of rows: uniform between -scale and scale. Only integers and exact products are used, so every
    processor makes the same bits."""
    values = np.empty((len(ids), dim), dtype=np.float32)
    base = splitmix64(ids.view(np.uint64) + _salt(table, seed))
    for column in range(0, dim, 2):
        words = splitmix64(base + np.uint64((column + 1) * _GOLDEN & _WORD))
        values[:, column] = words >> np.uint64(40)
        if column + 1 < dim:
            values[:, column + 1] = (words >> np.uint64(16)) & np.uint64(0xFFFFFF)
    values -= np.float32(1 << 23)
    values *= np.float32(scale) * np.float32(2.0**-23)
    return values


def _salt(*numbers: int) -> np.uint64:
    state = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        state = splitmix64(state + np.uint64((number + 1) * _GOLDEN & _WORD))
    return np.uint64(state[0])
