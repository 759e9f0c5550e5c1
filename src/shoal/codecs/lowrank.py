"""Matrices as products of two thin ones, after PowerSGD (Vogels, Karimireddy, Jaggi 2019)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.codecs.codec import check_decode, check_encode, summed
from shoal.codecs.piecewise import pieces
from shoal.codecs.scratch import Scratch
from shoal.codecs.size import FLOAT, Part, Shape, cut

ALIGNED_ROWS = 16  # so many rows of floats, of any length, end at a multiple of 64 bytes
SMALLEST = 2.0**-126


@dataclass(frozen=True)
class _Slot:
    """A part of the stretch, where it begins in what is sent, and where its Q lies in the memory."""

    part: Part
    sent: int
    start: int

    def of(self, stretch: Tensor) -> Tensor:
        return stretch[self.part.start : self.part.stop].view(self.part.rows, self.part.columns)

    def whole(self, sent: Tensor) -> Tensor:
        return sent[self.sent : self.sent + self.part.floats].view(self.part.rows, -1)

    def p(self, sent: Tensor) -> Tensor:
        return sent[self.sent : self.sent + self.part.rows * self.part.rank].view(-1, self.part.rank)

    def q(self, sent: Tensor) -> Tensor:
        after_p = self.sent + self.part.rows * self.part.rank
        return sent[after_p : self.sent + self.part.floats].view(self.part.rank, -1)

    def warm(self, memory: Tensor) -> Tensor:
        return memory[self.start : self.start + self.part.columns * self.part.rank].view(self.part.rank, -1)


class LowRank:
    """Each matrix of the stretch becomes P Q of the given rank; vectors, and what would not get smaller, stay.

    One step of the power method, which starts from the Q of the step before: over the steps it comes to hold the
    matrix's main directions. In the original, workers sum P, orthogonalise, and sum Q: two rounds. Here everybody sends
    P and Q of its own matrix, and the products are summed. That is one round, it works through servers and with members
    that come and go, and the sum has a higher rank; but what arrives grows with the number of contributors.

    A matrix that holds a value that is not finite decodes to NaN.
    """

    exact = False
    remembers = True
    adds = True

    def __init__(self, rank: int, shapes: Sequence[Shape], scratch: Scratch) -> None:
        self._scratch = scratch
        self._first: dict[tuple[int, int, torch.device], Tensor] = {}
        self._slots: list[_Slot] = []
        self._count = sum(map(_size, shapes))
        self._sent, self._memory = 0, self._count
        for part in cut(shapes, rank, self._count):
            self._slots.append(_Slot(part, self._sent, self._memory))
            self._sent += part.floats
            self._memory += part.columns * part.rank

    def size_bytes(self, count: int) -> int:
        self._check(count)
        return FLOAT * self._sent

    def memory_floats(self, count: int) -> int:
        self._check(count)
        return self._memory

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
        sent = out.view(torch.float32)
        if after is not None and not summed(values, after):
            room = after[:count]
            values = room.copy_(values) if before is None else torch.add(values, before[:count], out=room)
        for slot in self._slots:
            matrix = slot.of(values)
            if slot.part.rank:
                p, q = _factors(matrix, self._start(slot, before, matrix.device))
                slot.p(sent).copy_(p)
                slot.q(sent).copy_(q)
                if after is not None:
                    slot.warm(after).copy_(q)
                if after is not None or back is not None:
                    for rows, product in self._products(slot, sent):
                        if after is not None:
                            matrix[rows].sub_(product)
                        if back is not None:
                            slot.of(back)[rows].copy_(product)
            else:
                slot.whole(sent).copy_(matrix)
                if back is not None:
                    slot.of(back).copy_(matrix)
                if after is not None:
                    matrix.zero_()

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        check_decode(self, data, out)
        sent = data.view(torch.float32)
        for slot in self._slots:
            if slot.part.rank:
                for rows, product in self._products(slot, sent):
                    into = slot.of(out)[rows]
                    into.add_(product) if add else into.copy_(product)
            elif add:
                slot.of(out).add_(slot.whole(sent))
            else:
                slot.of(out).copy_(slot.whole(sent))

    def _products(self, slot: _Slot, sent: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Some rows at a time, from and into memory of our own: bits must not depend on where bytes happen to lie."""
        p, q = self._own("p", slot.p(sent)), self._own("q", slot.q(sent))
        columns = slot.part.columns
        for start, stop in pieces(slot.part.rows * columns, columns * ALIGNED_ROWS, sent.device):
            rows = slice(start // columns, stop // columns)
            room = self._scratch.take("product", stop - start, torch.float32, sent.device).view(-1, columns)
            yield rows, torch.mm(p[rows], q, out=room)

    def _own(self, name: str, matrix: Tensor) -> Tensor:
        return self._scratch.take(name, matrix.numel(), torch.float32, matrix.device).view_as(matrix).copy_(matrix)

    def _start(self, slot: _Slot, before: Tensor | None, device: torch.device) -> Tensor:
        """The last Q with rows of size 1. A row that is zero or not finite leads nowhere and starts anew."""
        key = (slot.part.columns, slot.part.rank, device)
        if key not in self._first:
            self._first[key] = scattered(slot.part.columns * slot.part.rank, device).view(slot.part.rank, -1)
        if before is None:
            return self._first[key]
        last = slot.warm(before)
        size = last.abs().amax(1, keepdim=True)
        return torch.where((size >= SMALLEST) & size.isfinite(), last / size, self._first[key])

    def _check(self, count: int) -> None:
        if count != self._count:
            raise ValueError(f"the shapes hold {self._count} values, the stretch {count}")


def _factors(matrix: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """P with orthonormal columns, and Q, so that P Q is the matrix seen along P. Thin matrices lie so that BLAS is
    quick with them: measured, up to ten times."""
    along = torch.mm(matrix, start.T)
    along.div_(along.abs().amax(0).clamp_min(SMALLEST))  # squares of what is very large or small stay finite
    p = torch.linalg.qr(along).Q
    return p, torch.mm(p.T, matrix)


def scattered(count: int, device: torch.device) -> Tensor:
    """Numbers in -1..1 without a pattern: a hash of their position."""
    it = torch.arange(1, count + 1, device=device)
    for _ in range(2):
        it = (it ^ it >> 16) * 0x7FEB352D & 0xFFFFFFFF
    return ((it ^ it >> 15) & 0xFFFFFF).to(torch.float32).div_(1 << 23).sub_(1)


def _size(shape: Shape) -> int:
    return torch.Size(shape).numel()
