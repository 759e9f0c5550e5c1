"""float32 values unchanged, or rounded to bfloat16 or float16."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.codecs.blockwise import BlockwiseCodec
from shoal.codecs.codec import ScratchBuffers


class Cast(BlockwiseCodec):
    """Each value in another dtype, rounded to nearest. A value that is too large becomes infinite, so training
    notices."""

    def __init__(self, dtype: torch.dtype, scratch: ScratchBuffers) -> None:
        super().__init__(scratch)
        self._dtype = dtype
        self.exact = dtype == torch.float32

    def size_bytes(self, count: int) -> int:
        return count * self._dtype.itemsize

    def residual_floats(self, count: int) -> int:
        return 0 if self.exact else count

    def _sections(self, data: Tensor, count: int) -> tuple[Tensor, ...]:
        return (data.view(self._dtype),)

    def _encode_piece(self, values: Tensor, sections: tuple[Tensor, ...], start: int) -> None:
        sections[0][start : start + values.numel()].copy_(values)

    def _decode_piece(self, sections: tuple[Tensor, ...], start: int, out: Tensor) -> None:
        out.copy_(sections[0][start : start + out.numel()])
