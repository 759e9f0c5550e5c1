"""Values as they are, or in half as many bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.codecs.piecewise import Piecewise
from shoal.codecs.scratch import Scratch


class Cast(Piecewise):
    """Each value in another type, rounded to the nearest. What is too large for it becomes infinite: never hidden."""

    def __init__(self, dtype: torch.dtype, scratch: Scratch) -> None:
        super().__init__(scratch)
        self._dtype = dtype
        self.exact = dtype == torch.float32

    def size_bytes(self, count: int) -> int:
        return count * self._dtype.itemsize

    def memory_floats(self, count: int) -> int:
        return 0 if self.exact else count

    def _split(self, data: Tensor, count: int) -> tuple[Tensor, ...]:
        return (data.view(self._dtype),)

    def _write(self, values: Tensor, parts: tuple[Tensor, ...], start: int) -> None:
        parts[0][start : start + values.numel()].copy_(values)

    def _read(self, parts: tuple[Tensor, ...], start: int, out: Tensor) -> None:
        out.copy_(parts[0][start : start + out.numel()])
