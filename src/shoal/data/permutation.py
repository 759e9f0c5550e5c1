"""Random permutations that are computed, not stored.

Nothing here depends on Python's `hash`, on a generator's state or on a library's version: the same key gives the same
order on every machine and in every version.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.spec.seeds import derive_seed

Ids = NDArray[np.int64]

_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = 8
_MIN_HALF_BITS = 3
_MAX_TABLE_BITS = 10


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser on every element: a bijection of 64-bit numbers."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def random_words(count: int, *, key: int, first: int = 0) -> NDArray[np.uint64]:
    """`count` random 64-bit numbers from number `first` on: splitmix64 from the state `key`."""
    return splitmix64(np.arange(first + 1, first + count + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(key))


def random_ids(n: int, count: int, *, key: int) -> Ids:
    """`count` random numbers below `n`, with replacement."""
    return (random_words(count, key=key) % np.uint64(n)).astype(np.int64)


class IndexOrder(Protocol):
    """A bijection of 0..n-1 that can be evaluated at any positions."""

    def __call__(self, positions: Ids) -> Ids: ...


class Permutation:
    """A random bijection of 0..n-1.

    A Feistel network permutes the smallest domain of 2^(2h) numbers that holds n. A result outside 0..n-1 goes through
    the network again until it is inside (cycle walking: at most four passes on average, except for tiny n). Halves
    have at most 32 bits, so all arithmetic is on uint32, which vector units handle fastest.
    """

    def __init__(self, n: int, key: int) -> None:
        self.n = n
        bits = max(n - 1, 1).bit_length()
        self._half_bits = max(_MIN_HALF_BITS, (bits + 1) // 2)
        self._keys = [np.uint32(derive_seed(key, i) >> 32) for i in range(_ROUNDS)]

    def __call__(self, positions: Ids) -> Ids:
        send = self._lookup_table().take if 2 * self._half_bits <= _MAX_TABLE_BITS else self._feistel
        out = send(positions)
        outside = np.flatnonzero(out >= self.n)
        while outside.size:
            again = send(out[outside])
            out[outside] = again
            outside = outside[again >= self.n]
        return out

    def _lookup_table(self) -> Ids:
        """The network on its whole domain. For tiny n most walks are long, and a table is faster."""
        return self._feistel(np.arange(1 << 2 * self._half_bits))

    def _feistel(self, x: Ids) -> Ids:
        mask = np.uint32((1 << self._half_bits) - 1)
        left = (x >> self._half_bits).astype(np.uint32)
        right = x.astype(np.uint32) & mask
        for key in self._keys:
            left, right = right, left ^ (_murmur3_mix(right ^ key) & mask)
        return (left.astype(np.int64) << self._half_bits) | right


def _murmur3_mix(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """murmur3's finaliser, in place: each bit of the input changes each bit of the output half the time."""
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return x


class BlockShuffle:
    """A random order that touches few storage blocks at a time.

    The blocks are permuted, each `open_blocks` consecutive permuted blocks form a window, and positions are permuted
    inside each window. `edges` are the starts of the blocks, and n (see `block_edges`). With `in_order`, the blocks
    stay where they are: storage that can only be read from its beginning.
    """

    def __init__(self, edges: Ids, *, open_blocks: int, key: int, in_order: bool = False) -> None:
        count = len(edges) - 1
        blocks = np.arange(count)
        if not in_order:
            blocks = Permutation(count, derive_seed(key, 0))(blocks)
        self._starts = edges[blocks]
        self._ends = np.cumsum(edges[blocks + 1] - self._starts)
        self._windows = np.append(self._ends[open_blocks - 1 : -1 : open_blocks], self._ends[-1:])
        self._key = key

    def __call__(self, positions: Ids) -> Ids:
        windows = np.searchsorted(self._windows, positions, side="right")
        out = np.empty_like(positions)
        for window in np.unique(windows):
            here = windows == window
            out[here] = self._permute_window(int(window), positions[here])
        return out

    def _permute_window(self, window: int, positions: Ids) -> Ids:
        first = int(self._windows[window - 1]) if window else 0
        size = int(self._windows[window]) - first
        moved = first + Permutation(size, derive_seed(self._key, 1, window))(positions - first)
        block = np.searchsorted(self._ends, moved, side="right")
        before = np.where(block > 0, self._ends[block - 1], 0)
        return self._starts[block] + (moved - before)


def block_edges(ids: Ids, blocks: Ids) -> Ids:
    """Positions in the sorted `ids` at which the blocks that start at rows `blocks` begin. Empty blocks are omitted."""
    starts = np.searchsorted(ids, blocks, side="left")
    return np.unique(np.concatenate([[0], starts, [len(ids)]])).astype(np.int64)
