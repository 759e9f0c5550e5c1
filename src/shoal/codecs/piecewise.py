"""Codecs that treat their values piece by piece, each piece small enough to stay in a core's cache.

That is what makes several passes over the values about as cheap as one, and keeps scratch memory small.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from shoal.codecs.codec import check_decode, check_encode, summed
from shoal.codecs.scratch import Scratch

PIECE = 1 << 18  # measured: with half of it, starting kernels costs more than caches save
PIECE_ELSEWHERE = 1 << 24  # accelerators want few and large kernels


class Piecewise(ABC):
    """The walk over the pieces. What is lost is found by reading back what was written."""

    exact = False
    remembers = False
    adds = True
    width = 1  # no piece but the last ends within so many values

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch

    @abstractmethod
    def size_bytes(self, count: int) -> int: ...

    @abstractmethod
    def _split(self, data: Tensor, count: int) -> tuple[Tensor, ...]:
        """The parts of the encoded bytes, each as what it holds."""

    @abstractmethod
    def _write(self, values: Tensor, parts: tuple[Tensor, ...], start: int) -> None:
        """Encode the piece that begins at value number `start`."""

    @abstractmethod
    def _read(self, parts: tuple[Tensor, ...], start: int, out: Tensor) -> None:
        """Decode the piece that begins at value number `start`."""

    def _read_back(self, parts: tuple[Tensor, ...], start: int, out: Tensor) -> None:
        """Decode the piece that was written just now: the same bits."""
        self._read(parts, start, out)

    def memory_floats(self, count: int) -> int:
        return count

    def encode(
        self,
        values: Tensor,
        out: Tensor,
        *,
        before: Tensor | None = None,
        after: Tensor | None = None,
        back: Tensor | None = None,
    ) -> None:
        count = check_encode(self, values, out, before, after, back)
        if not self.memory_floats(count):
            before = after = None
        there = after is not None and summed(values, after)
        parts = self._split(out, count)
        for start, stop in self._pieces(count, values.device):
            piece = values[start:stop]
            if after is not None and not there:
                left = after[start:stop]
                piece = left.copy_(piece) if before is None else torch.add(piece, before[start:stop], out=left)
            self._write(piece, parts, start)
            if after is not None or back is not None:
                room = self._floats(piece) if back is None else back[start:stop]
                self._read_back(parts, start, room)
                if after is not None:
                    piece.sub_(room)

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        count = check_decode(self, data, out)
        parts = self._split(data, count)
        for start, stop in self._pieces(count, out.device):
            piece = out[start:stop]
            if not add:
                self._read(parts, start, piece)
                continue
            back = self._floats(piece)
            self._read(parts, start, back)
            piece.add_(back)

    def _pieces(self, count: int, device: torch.device) -> Iterable[tuple[int, int]]:
        return pieces(count, self.width, device)

    def _floats(self, like: Tensor) -> Tensor:
        return self._scratch.take("piece", like.numel(), torch.float32, like.device)

    def _rows(self, piece: Tensor) -> Tensor:
        """One row per block. What is left at the end is a piece of its own and one shorter row."""
        return piece.view(-1, min(self.width, piece.numel()))


def pieces(count: int, width: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Where pieces of whole blocks of this width begin and end; the last may be the rest, less than a block."""
    most = PIECE if device.type == "cpu" else PIECE_ELSEWHERE
    step = max(most // width, 1) * width
    whole = count // width * width
    yield from ((start, min(start + step, whole)) for start in range(0, whole, step))
    if whole < count:
        yield whole, count
