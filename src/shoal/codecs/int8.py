"""Integers from -127 to 127, with one scale per block."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.codecs.blockwise import BlockwiseCodec
from shoal.codecs.codec import ScratchBuffers
from shoal.codecs.size import FLOAT_BYTES, block_count

MAX_INT = 127
MIN_SCALE = 2.0**-120  # below this, 127 / scale would not be finite
# Added to a small number, this leaves the nearest integer in the low bits of the sum. So rounding is one addition, and
# needs no conversion from float to int, which is undefined for values that are not finite.
ROUNDING_OFFSET = 1.5 * 2**23


class Int8(BlockwiseCodec):
    """The largest value of a block becomes ±127. The error of a value is at most 1/254 of the largest.

    A block whose largest value is below 2**-120 becomes zeros. A block with a value that is not finite gets a scale
    that is not finite, so all of its values decode to values that are not finite.
    """

    def __init__(self, block: int, scratch: ScratchBuffers) -> None:
        super().__init__(scratch)
        self.alignment = block

    def size_bytes(self, count: int) -> int:
        return self._scales_bytes(count) + count

    def _scales_bytes(self, count: int) -> int:
        return FLOAT_BYTES * block_count(count, self.alignment)

    def _sections(self, data: Tensor, count: int) -> tuple[Tensor, ...]:
        end = self._scales_bytes(count)
        return data[:end].view(torch.float32), data[end:].view(torch.int8)

    def _encode_piece(self, values: Tensor, sections: tuple[Tensor, ...], start: int) -> None:
        rows = self._block_rows(values)
        scales, numbers = self._section_slices(sections, start, rows)
        room = self._scratch.get("rounding", values.numel(), torch.float32, values.device)
        largest = torch.amax(torch.abs(rows, out=room.view_as(rows)), 1, out=scales)
        largest.mul_(largest >= MIN_SCALE)
        factors = self._scratch.get("factors", len(rows), torch.float32, values.device)
        torch.reciprocal(largest, out=factors).mul_(MAX_INT)
        torch.mul(rows, factors[:, None], out=room.view_as(rows))
        scales.div_(MAX_INT)
        numbers.copy_(room.add_(ROUNDING_OFFSET).view(torch.int32))

    def _decode_piece(self, sections: tuple[Tensor, ...], start: int, out: Tensor) -> None:
        rows = self._block_rows(out)
        scales, numbers = self._section_slices(sections, start, rows)
        out.copy_(numbers)
        rows.mul_(scales[:, None])

    def _section_slices(self, sections: tuple[Tensor, ...], start: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        scales, numbers = sections
        first = start // self.alignment
        return scales[first : first + len(rows)], numbers[start : start + rows.numel()]
