"""An adaptive binary range coder for matrices of small numbers, most of them zero.

Each number is coded as bits: whether it is zero, and if not, which one it is. The probability of a bit is learned from
the bits before it that had the same context. For "zero or not", the context is how often the column was not zero in
the rows above, and the two neighbours that are known. All arithmetic is in whole numbers, so that every machine reads
what another one wrote.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

MAX_CODES = 1 << 22
"""Longer matrices take too long: a number takes some microseconds."""
_TOP, _MASK = 1 << 24, (1 << 32) - 1
_ONE = 1 << 16
_LEAST = 48
_FAST, _SLOW = 4, 7
_LEVELS = np.array([16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072])
Codes = NDArray[np.uint8]
Bit = Callable[[int, int], int]
"""Codes a bit in a context and returns it; a reader does not look at the bit that it is given."""


def encode_codes(codes: Codes, bits: int) -> bytes:
    """The numbers of a matrix, each below 2 ** bits."""
    writer = _Writer(_contexts(bits))
    _walk(writer.bit, codes.copy(), bits)
    return writer.finish()


def decode_codes(content: bytes, shape: tuple[int, int], bits: int) -> Codes:
    """The matrix of this shape. Any content gives a matrix: whether it is the right one, a checksum must tell."""
    codes = np.zeros(shape, dtype=np.uint8)
    _walk(_Reader(_contexts(bits), content).bit, codes, bits)
    return codes


def _contexts(bits: int) -> int:
    return 4 * (len(_LEVELS) + 1) + (1 << bits)


def _walk(bit: Bit, codes: Codes, bits: int) -> None:
    """The same way for writer and reader. The reader's numbers are filled in."""
    counts = np.zeros(codes.shape[1], dtype=np.int64)
    above = np.zeros(codes.shape[1], dtype=np.int64)
    tree, highest = 4 * (len(_LEVELS) + 1), 1 << bits
    for number, row in enumerate(codes):
        levels = np.searchsorted(_LEVELS, (counts * 4096 + 1638) // (number + 1))
        contexts: list[int] = (4 * levels + 2 * above).tolist()
        known, found, left = row.tolist(), [0] * len(contexts), 0
        for column, context in enumerate(contexts):
            code = known[column]
            left = bit(context + left, int(code != 0))
            if left:
                node = 1
                for place in range(bits - 1, -1, -1):
                    node = 2 * node + bit(tree + node, code >> place & 1)
                found[column] = node - highest
        row[:] = found
        above = (row != 0).astype(np.int64)
        counts += above


class _Probabilities:
    """Of a one in each context, of 65,536: the mean of one that follows quickly and one that follows slowly."""

    def __init__(self, contexts: int) -> None:
        self._fast, self._slow = [_ONE // 2] * contexts, [_ONE // 2] * contexts

    def of_one(self, context: int) -> int:
        return min(max((self._fast[context] + self._slow[context]) >> 1, _LEAST), _ONE - _LEAST)

    def learn(self, context: int, bit: int) -> None:
        goal = _ONE if bit else 0
        self._fast[context] += (goal - self._fast[context]) >> _FAST
        self._slow[context] += (goal - self._slow[context]) >> _SLOW


class _Writer:
    def __init__(self, contexts: int) -> None:
        self._known = _Probabilities(contexts)
        self._low, self._range = 0, _MASK
        self._out = bytearray()

    def bit(self, context: int, bit: int) -> int:
        bound = (self._range >> 16) * self._known.of_one(context)
        if bit:
            self._range = bound
        else:
            self._low += bound
            self._range -= bound
        self._known.learn(context, bit)
        while self._range < _TOP:
            self._range <<= 8
            self._shift()
        return bit

    def _shift(self) -> None:
        """The highest byte is written; what overflows is added to the bytes before it."""
        if self._low > _MASK:
            place = len(self._out) - 1
            while self._out[place] == 255:
                self._out[place] = 0
                place -= 1
            self._out[place] += 1
        self._out.append(self._low >> 24 & 255)
        self._low = self._low << 8 & _MASK

    def finish(self) -> bytes:
        for _ in range(4):
            self._shift()
        return bytes(self._out).rstrip(b"\0")


class _Reader:
    """Behind its end, content is zeros."""

    def __init__(self, contexts: int, content: bytes) -> None:
        self._known = _Probabilities(contexts)
        self._range = _MASK
        self._bytes = iter(content)
        self._code = 0
        for _ in range(4):
            self._code = self._code << 8 | next(self._bytes, 0)

    def bit(self, context: int, bit: int) -> int:
        bound = (self._range >> 16) * self._known.of_one(context)
        found = int(self._code < bound)
        if found:
            self._range = bound
        else:
            self._code -= bound
            self._range -= bound
        self._known.learn(context, found)
        while self._range < _TOP:
            self._range <<= 8
            self._code = self._code << 8 | next(self._bytes, 0)
        return found
