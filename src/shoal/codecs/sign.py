"""One bit per value, with one scale per block."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.codecs.piecewise import Piecewise
from shoal.codecs.scratch import Scratch
from shoal.codecs.size import FLOAT, SIGN_BLOCK, blocks

# Eight bytes of 0 or 1, taken as one number and multiplied by this, have their bits side by side in the top byte.
GATHER = 0x0102040810204080
LOWEST = 0x0101010101010101


class Sign(Piecewise):
    """A value's sign times the mean size of its block. What that is off by must not be forgotten.

    A block that holds a value that is not finite has a scale that is not finite, and so is all that it decodes to.
    """

    remembers = True
    width = SIGN_BLOCK

    def __init__(self, scratch: Scratch) -> None:
        super().__init__(scratch)
        self._tables: dict[torch.device, Tensor] = {}

    def size_bytes(self, count: int) -> int:
        return FLOAT * blocks(count, SIGN_BLOCK) + blocks(count, 8)

    def _split(self, data: Tensor, count: int) -> tuple[Tensor, ...]:
        end = FLOAT * blocks(count, SIGN_BLOCK)
        return data[:end].view(torch.float32), data[end:]

    def _write(self, values: Tensor, parts: tuple[Tensor, ...], start: int) -> None:
        rows = self._rows(values)
        scales, bits = self._of(parts, start, rows)
        room = self._scratch.take("sizes", values.numel(), torch.float32, values.device)
        torch.mean(torch.abs(rows, out=room.view_as(rows)), 1, out=scales)
        below = torch.bitwise_right_shift(values.view(torch.int32), 31, out=room.view(torch.int32))
        words = self._scratch.take("words", bits.numel(), torch.int64, values.device)
        words[-1] = 0  # behind the last value
        words.view(torch.int8)[: values.numel()].copy_(below)
        words.bitwise_and_(LOWEST).mul_(GATHER).bitwise_right_shift_(56)
        bits.copy_(words)

    def _read(self, parts: tuple[Tensor, ...], start: int, out: Tensor) -> None:
        rows = self._rows(out)
        scales, bits = self._of(parts, start, rows)
        which = self._scratch.take("which", bits.numel(), torch.int32, out.device).copy_(bits)
        words = self._scratch.take("words", bits.numel(), torch.int64, out.device)
        torch.index_select(self._table(out.device), 0, which, out=words)
        out.copy_(words.view(torch.int8)[: out.numel()])
        rows.mul_(scales[:, None])

    def _of(self, parts: tuple[Tensor, ...], start: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        scales, bits = parts
        first, byte = start // SIGN_BLOCK, start // 8
        return scales[first : first + len(rows)], bits[byte : byte + blocks(rows.numel(), 8)]

    def _table(self, device: torch.device) -> Tensor:
        """For each byte the eight signs that its bits stand for, as int8 numbers side by side."""
        if device not in self._tables:
            bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
            self._tables[device] = (1 - 2 * bits).to(torch.int8).view(torch.int64).view(-1).to(device)
        return self._tables[device]
