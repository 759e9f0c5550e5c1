"""Matrices as products of two thin ones, after PowerSGD (Vogels, Karimireddy, Jaggi 2019)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.codecs.blockwise import pieces
from shoal.codecs.codec import ScratchBuffers, aligned_parts, check_decode, check_encode, shares_memory
from shoal.codecs.size import FLOAT_BYTES, MatrixSegment, Shape, matrix_segments

ALIGNED_ROWS = 16  # this many rows of floats, of any length, end at a multiple of 64 bytes
MIN_NORM = 2.0**-126


@dataclass(frozen=True)
class _Slot:
    """A segment of the values, its offset in the encoded floats, and the offset of its Q in the residual."""

    segment: MatrixSegment
    sent_start: int
    q_start: int

    def matrix(self, flat: Tensor) -> Tensor:
        return flat[self.segment.start : self.segment.stop].view(self.segment.rows, self.segment.columns)

    def uncompressed(self, sent: Tensor) -> Tensor:
        return sent[self.sent_start : self.sent_start + self.segment.sent_floats].view(self.segment.rows, -1)

    def p(self, sent: Tensor) -> Tensor:
        return sent[self.sent_start : self.sent_start + self.segment.rows * self.segment.rank].view(
            -1, self.segment.rank
        )

    def q(self, sent: Tensor) -> Tensor:
        after_p = self.sent_start + self.segment.rows * self.segment.rank
        return sent[after_p : self.sent_start + self.segment.sent_floats].view(self.segment.rank, -1)

    def row_blocks(self, first: int, last: int) -> slice:
        """The rows of the blocks in which P Q is computed that hold any of the matrix's values [first, last)."""
        columns = self.segment.columns
        blocks = pieces(self.segment.count, columns * ALIGNED_ROWS, torch.device("cpu"))
        found = [(a, b) for a, b in blocks if a < last and first < b]
        return slice(found[0][0] // columns, found[-1][1] // columns)

    def cut_floats(self, first: int, last: int) -> int:
        """Number of floats that a cut has of this segment."""
        if not self.segment.rank:
            return last - first
        rows = self.row_blocks(first, last)
        height: int = rows.stop - rows.start
        return self.segment.rank * (height + self.segment.columns)

    def previous_q(self, residual: Tensor) -> Tensor:
        return residual[self.q_start : self.q_start + self.segment.columns * self.segment.rank].view(
            self.segment.rank, -1
        )


class LowRank:
    """Each matrix becomes P Q of the given rank. Vectors, and matrices that would not get smaller, are sent unchanged.

    Each step is one power iteration that starts from the Q of the previous step, so Q converges to the main directions
    of the matrix. In PowerSGD the workers sum P, orthogonalise, and sum Q: two rounds. Here each worker sends P and Q
    of its own matrix and the receiver sums the products. That needs one round, works with servers and with changing
    workers, and the sum has a higher rank; but the bytes received grow with the number of contributors.

    A matrix with a value that is not finite decodes to NaN.
    """

    exact = False
    needs_residual = True
    adds_residual = True

    def __init__(self, rank: int, shapes: Sequence[Shape], scratch: ScratchBuffers) -> None:
        self._scratch = scratch
        self._initial_factors: dict[tuple[int, int, torch.device], Tensor] = {}
        self._slots: list[_Slot] = []
        self._count = sum(map(_size, shapes))
        self._sent_floats, self._residual_floats = 0, self._count
        for part in matrix_segments(shapes, rank, self._count):
            self._slots.append(_Slot(part, self._sent_floats, self._residual_floats))
            self._sent_floats += part.sent_floats
            self._residual_floats += part.columns * part.rank

    def size_bytes(self, count: int) -> int:
        self._check_count(count)
        return FLOAT_BYTES * self._sent_floats

    def residual_floats(self, count: int) -> int:
        self._check_count(count)
        return self._residual_floats

    def encode(
        self,
        values: Tensor,
        out: Tensor,
        *,
        residual_in: Tensor | None = None,
        residual_out: Tensor | None = None,
        decoded: Tensor | None = None,
    ) -> None:
        count = check_encode(self, values, out, residual_in, residual_out, decoded)
        sent = out.view(torch.float32)
        if residual_out is not None and not shares_memory(values, residual_out):
            room = residual_out[:count]
            values = room.copy_(values) if residual_in is None else torch.add(values, residual_in[:count], out=room)
        for slot in self._slots:
            matrix = slot.matrix(values)
            if slot.segment.rank:
                p, q = _power_iteration(matrix, self._initial_q(slot, residual_in, matrix.device))
                slot.p(sent).copy_(p)
                slot.q(sent).copy_(q)
                if residual_out is not None:
                    slot.previous_q(residual_out).copy_(q)
                if residual_out is not None or decoded is not None:
                    for rows, product in self._products(slot, sent):
                        if residual_out is not None:
                            matrix[rows].sub_(product)
                        if decoded is not None:
                            slot.matrix(decoded)[rows].copy_(product)
            else:
                slot.uncompressed(sent).copy_(matrix)
                if decoded is not None:
                    slot.matrix(decoded).copy_(matrix)
                if residual_out is not None:
                    matrix.zero_()

    def decode(self, data: Tensor, out: Tensor, *, add: bool = False) -> None:
        check_decode(self, data, out)
        sent = data.view(torch.float32)
        for slot in self._slots:
            if slot.segment.rank:
                for rows, product in self._products(slot, sent):
                    into = slot.matrix(out)[rows]
                    into.add_(product) if add else into.copy_(product)
            elif add:
                slot.matrix(out).add_(slot.uncompressed(sent))
            else:
                slot.matrix(out).copy_(slot.uncompressed(sent))

    # ---- a range of the values: of a matrix all of Q, and P for the blocks of rows in which the values lie ----

    def cut(self, data: Tensor, count: int, start: int, stop: int) -> list[Tensor]:
        self._check_count(count)
        sent, parts = data.view(torch.float32), []
        for slot, first, last in self._slots_within(start, stop):
            if slot.segment.rank:
                parts += [slot.p(sent)[slot.row_blocks(first, last)].reshape(-1), slot.q(sent).reshape(-1)]
            else:
                parts.append(slot.uncompressed(sent).view(-1)[first:last])
        return [part.view(torch.uint8) for part in parts]

    def max_cut_bytes(self, count: int, start: int, stop: int) -> int:
        self._check_count(count)
        return FLOAT_BYTES * sum(slot.cut_floats(first, last) for slot, first, last in self._slots_within(start, stop))

    def decode_cut(self, data: Tensor, count: int, start: int, stop: int, out: Tensor) -> int:
        size_bytes = self.max_cut_bytes(count, start, stop)
        sent, offset = aligned_parts(data, size_bytes).view(torch.float32), 0
        for slot, first, last in self._slots_within(start, stop):
            part = sent[offset : offset + slot.cut_floats(first, last)]
            offset += part.numel()
            into = out[slot.segment.start + first - start : slot.segment.start + last - start]
            if not slot.segment.rank:
                into.copy_(part)
                continue
            rows, columns = slot.row_blocks(first, last), slot.segment.columns
            height = rows.stop - rows.start
            p, q = part[: height * slot.segment.rank], part[height * slot.segment.rank :]
            for block, product in self._block_products(p.view(height, -1), q.view(slot.segment.rank, -1)):
                begin = (rows.start + block.start) * columns
                a, b = max(first, begin), min(last, begin + product.numel())
                if a < b:
                    into[a - first : b - first].copy_(product.view(-1)[a - begin : b - begin])
        return size_bytes

    def _slots_within(self, start: int, stop: int) -> Iterator[tuple[_Slot, int, int]]:
        """The slots that hold any of these values, and which of its values those are."""
        for slot in self._slots:
            first, last = max(start, slot.segment.start), min(stop, slot.segment.stop)
            if first < last:
                yield slot, first - slot.segment.start, last - slot.segment.start

    def _products(self, slot: _Slot, sent: Tensor) -> Iterator[tuple[slice, Tensor]]:
        return self._block_products(slot.p(sent), slot.q(sent))

    def _block_products(self, p: Tensor, q: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """P Q, some rows at a time. Works in aligned scratch memory, because the bits must not depend on alignment."""
        p, q = self._aligned_copy("p", p), self._aligned_copy("q", q)
        columns = q.shape[1]
        for start, stop in pieces(len(p) * columns, columns * ALIGNED_ROWS, p.device):
            rows = slice(start // columns, stop // columns)
            room = self._scratch.get("product", stop - start, torch.float32, p.device).view(-1, columns)
            yield rows, torch.mm(p[rows], q, out=room)

    def _aligned_copy(self, name: str, matrix: Tensor) -> Tensor:
        return self._scratch.get(name, matrix.numel(), torch.float32, matrix.device).view_as(matrix).copy_(matrix)

    def _initial_q(self, slot: _Slot, residual_in: Tensor | None, device: torch.device) -> Tensor:
        """The Q of the previous step with normalised rows. A row that is zero or not finite is initialised anew."""
        key = (slot.segment.columns, slot.segment.rank, device)
        if key not in self._initial_factors:
            self._initial_factors[key] = hash_uniform(slot.segment.columns * slot.segment.rank, device).view(
                slot.segment.rank, -1
            )
        if residual_in is None:
            return self._initial_factors[key]
        last = slot.previous_q(residual_in)
        size = last.abs().amax(1, keepdim=True)
        return torch.where((size >= MIN_NORM) & size.isfinite(), last / size, self._initial_factors[key])

    def _check_count(self, count: int) -> None:
        if count != self._count:
            raise ValueError(f"the shapes hold {self._count} values, but {count} are given")


def _power_iteration(matrix: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """P with orthonormal columns, and Q, so that P Q is the projection of the matrix onto P. The memory layout of the
    thin matrices makes BLAS up to ten times faster (measured)."""
    along = torch.mm(matrix, start.T)
    along.div_(along.abs().amax(0).clamp_min(MIN_NORM))  # so that squares of very large or small values stay finite
    p = torch.linalg.qr(along).Q
    return p, torch.mm(p.T, matrix)


def hash_uniform(count: int, device: torch.device) -> Tensor:
    """Pseudo-random numbers in -1..1: a hash of their position."""
    it = torch.arange(1, count + 1, device=device)
    for _ in range(2):
        it = (it ^ it >> 16) * 0x7FEB352D & 0xFFFFFFFF
    return ((it ^ it >> 15) & 0xFFFFFF).to(torch.float32).div_(1 << 23).sub_(1)


def _size(shape: Shape) -> int:
    return torch.Size(shape).numel()
