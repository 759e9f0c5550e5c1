"""Whole numbers of -127..127, with one scale per block."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.codecs.piecewise import Piecewise
from shoal.codecs.scratch import Scratch
from shoal.codecs.size import FLOAT, blocks

MOST = 127
TINY = 2.0**-120  # below, 127 / scale would not be finite
# Added to a small number, this leaves the nearest whole number in the low bits of the sum: rounding for one addition,
# and without float's conversion to int, which gives anything for what is not finite.
ROUND = 1.5 * 2**23


class Int8(Piecewise):
    """A block's largest value becomes ±127; nothing is off by more than 1/254 of it.

    A block whose largest value is below 2**-120 becomes zeros. A block that holds a value that is not finite has a
    scale that is not finite, and all of it decodes to values that are not.
    """

    def __init__(self, block: int, scratch: Scratch) -> None:
        super().__init__(scratch)
        self.width = block

    def size_bytes(self, count: int) -> int:
        return FLOAT * blocks(count, self.width) + count

    def _split(self, data: Tensor, count: int) -> tuple[Tensor, ...]:
        end = FLOAT * blocks(count, self.width)
        return data[:end].view(torch.float32), data[end:].view(torch.int8)

    def _write(self, values: Tensor, parts: tuple[Tensor, ...], start: int) -> None:
        rows = self._rows(values)
        scales, numbers = self._of(parts, start, rows)
        room = self._scratch.take("rounding", values.numel(), torch.float32, values.device)
        largest = torch.amax(torch.abs(rows, out=room.view_as(rows)), 1, out=scales)
        largest.mul_(largest >= TINY)
        factors = self._scratch.take("factors", len(rows), torch.float32, values.device)
        torch.reciprocal(largest, out=factors).mul_(MOST)
        torch.mul(rows, factors[:, None], out=room.view_as(rows))
        scales.div_(MOST)
        numbers.copy_(room.add_(ROUND).view(torch.int32))

    def _read(self, parts: tuple[Tensor, ...], start: int, out: Tensor) -> None:
        rows = self._rows(out)
        scales, numbers = self._of(parts, start, rows)
        out.copy_(numbers)
        rows.mul_(scales[:, None])

    def _of(self, parts: tuple[Tensor, ...], start: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        scales, numbers = parts
        first = start // self.width
        return scales[first : first + len(rows)], numbers[start : start + rows.numel()]
