"""Whole numbers of -7..7, two in a byte, with one scale per block."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.codecs.int8 import Whole
from shoal.codecs.scratch import Scratch
from shoal.codecs.size import FLOAT, blocks


class Int4(Whole):
    """What values are off by, up to 1/14 of the largest of their block, must not be forgotten."""

    most = 7
    remembers = True

    def __init__(self, block: int, scratch: Scratch) -> None:
        super().__init__(block, scratch)
        self._tables: dict[torch.device, Tensor] = {}

    def size_bytes(self, count: int) -> int:
        return FLOAT * blocks(count, self.width) + blocks(count, 2)

    def _split(self, data: Tensor, count: int) -> tuple[Tensor, ...]:
        end = FLOAT * blocks(count, self.width)
        return data[:end].view(torch.float32), data[end:]

    def _write(self, values: Tensor, parts: tuple[Tensor, ...], start: int) -> None:
        scales, packed = self._of(parts, start, self._rows(values))
        numbers = self._numbers(values)
        numbers[-1] = 0  # perhaps behind the last value
        numbers[: values.numel()].copy_(self._rounded(values, scales))
        pairs = numbers.view(torch.int16)
        lower, upper = (self._scratch.take(half, len(pairs), torch.int16, pairs.device) for half in ("lower", "upper"))
        torch.bitwise_and(pairs, 0x0F, out=lower)
        torch.bitwise_right_shift(pairs, 4, out=upper)
        packed.copy_(lower.bitwise_or_(upper.bitwise_and_(0xF0)))

    def _read_back(self, parts: tuple[Tensor, ...], start: int, out: Tensor) -> None:
        """The numbers still lie there, not packed."""
        rows = self._rows(out)
        scales, _ = self._of(parts, start, rows)
        torch.mul(self._numbers(out)[: out.numel()].view_as(rows), scales[:, None], out=rows)

    def _numbers(self, like: Tensor) -> Tensor:
        """Room for one a byte, in pairs."""
        return self._scratch.take("numbers", 2 * blocks(like.numel(), 2), torch.int8, like.device)

    def _read(self, parts: tuple[Tensor, ...], start: int, out: Tensor) -> None:
        rows = self._rows(out)
        scales, packed = self._of(parts, start, rows)
        which = self._scratch.take("which", packed.numel(), torch.int32, out.device).copy_(packed)
        pairs = self._scratch.take("pairs", packed.numel(), torch.int16, out.device)
        torch.index_select(self._table(out.device), 0, which, out=pairs)
        out.copy_(pairs.view(torch.int8)[: out.numel()])
        rows.mul_(scales[:, None])

    def _of(self, parts: tuple[Tensor, ...], start: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        scales, packed = parts
        first, byte = start // self.width, start // 2
        return scales[first : first + len(rows)], packed[byte : byte + blocks(rows.numel(), 2)]

    def _table(self, device: torch.device) -> Tensor:
        """For each byte the two numbers that it stands for, as int8 side by side."""
        if device not in self._tables:
            bits = torch.arange(256).unsqueeze(1) >> torch.tensor([0, 4]) & 15
            self._tables[device] = (bits - 16 * (bits > self.most)).to(torch.int8).view(torch.int16).view(-1).to(device)
        return self._tables[device]
