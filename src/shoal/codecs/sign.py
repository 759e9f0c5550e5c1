"""One bit per value, with one scale per block."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.codecs.blockwise import BlockwiseCodec
from shoal.codecs.codec import ScratchBuffers
from shoal.codecs.size import FLOAT_BYTES, SIGN_BLOCK, block_count

# Multiplying eight bytes of 0 or 1, read as one integer, by this puts their bits side by side into the top byte.
GATHER_BITS = 0x0102040810204080
LOWEST_BITS = 0x0101010101010101


class SignBits(BlockwiseCodec):
    """Each value becomes its sign times the mean magnitude of its block. Needs error feedback.

    A block with a value that is not finite gets a scale that is not finite, so all of its values decode to such.
    """

    needs_residual = True
    alignment = SIGN_BLOCK

    def __init__(self, scratch: ScratchBuffers) -> None:
        super().__init__(scratch)
        self._signs_of_byte: dict[torch.device, Tensor] = {}

    def size_bytes(self, count: int) -> int:
        return self._scales_bytes(count) + block_count(count, 8)

    def _scales_bytes(self, count: int) -> int:
        return FLOAT_BYTES * block_count(count, SIGN_BLOCK)

    def _sections(self, data: Tensor, count: int) -> tuple[Tensor, ...]:
        end = self._scales_bytes(count)
        return data[:end].view(torch.float32), data[end:]

    def _encode_piece(self, values: Tensor, sections: tuple[Tensor, ...], start: int) -> None:
        rows = self._block_rows(values)
        scales, bits = self._section_slices(sections, start, rows)
        room = self._scratch.get("sizes", values.numel(), torch.float32, values.device)
        torch.mean(torch.abs(rows, out=room.view_as(rows)), 1, out=scales)
        below = torch.bitwise_right_shift(values.view(torch.int32), 31, out=room.view(torch.int32))
        words = self._scratch.get("words", bits.numel(), torch.int64, values.device)
        words[-1] = 0  # padding after the last value
        words.view(torch.int8)[: values.numel()].copy_(below)
        words.bitwise_and_(LOWEST_BITS).mul_(GATHER_BITS).bitwise_right_shift_(56)
        bits.copy_(words)

    def _decode_piece(self, sections: tuple[Tensor, ...], start: int, out: Tensor) -> None:
        rows = self._block_rows(out)
        scales, bits = self._section_slices(sections, start, rows)
        which = self._scratch.get("which", bits.numel(), torch.int32, out.device).copy_(bits)
        words = self._scratch.get("words", bits.numel(), torch.int64, out.device)
        torch.index_select(self._byte_signs(out.device), 0, which, out=words)
        out.copy_(words.view(torch.int8)[: out.numel()])
        rows.mul_(scales[:, None])

    def _section_slices(self, sections: tuple[Tensor, ...], start: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        scales, bits = sections
        first, byte = start // SIGN_BLOCK, start // 8
        return scales[first : first + len(rows)], bits[byte : byte + block_count(rows.numel(), 8)]

    def _byte_signs(self, device: torch.device) -> Tensor:
        """A lookup table: for each byte the eight signs that its bits encode, as int8."""
        if device not in self._signs_of_byte:
            bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
            self._signs_of_byte[device] = (1 - 2 * bits).to(torch.int8).view(torch.int64).view(-1).to(device)
        return self._signs_of_byte[device]
