"""A copy of the state at the moment of a save, so that training can go on while it is written."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.state_tree import Skeleton

_ALIGNMENT_BYTES = 64

BufferLayout = dict[str, tuple[torch.dtype, torch.Size]]


@dataclass(frozen=True)
class Snapshot:
    """A state that stays unchanged until it is written. `external_blobs` are blobs that other processes wrote for
    it."""

    step: int
    metric: float | None
    tensors: Mapping[str, Tensor]
    tree: Skeleton
    info: Mapping[str, Any] = field(default_factory=dict)
    external_blobs: Mapping[str, int] = field(default_factory=dict)


class HostBuffers:
    """Memory for one snapshot. It is reused, because the page faults of fresh memory cost more than the copy."""

    def __init__(self) -> None:
        self._layout: BufferLayout = {}
        self._buffers: dict[str, Tensor] = {}

    def fill(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Contiguous copies on the host, valid until the next call. Tied tensors are copied once."""
        first: dict[tuple[Any, ...], str] = {}
        owner = {name: first.setdefault(_memory_identity(tensor), name) for name, tensor in tensors.items()}
        self._reserve({name: (tensors[name].dtype, tensors[name].shape) for name in first.values()})
        for name, buffer in self._buffers.items():
            buffer.copy_(tensors[name].detach())
        return {name: self._buffers[owner[name]] for name in tensors}

    def _reserve(self, layout: BufferLayout) -> None:
        if layout != self._layout:
            self._layout, self._buffers = {}, {}  # free the old memory before allocating the new
            self._buffers = _allocate(layout)
            self._layout = layout


def _allocate(layout: BufferLayout) -> dict[str, Tensor]:
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (dtype, shape) in layout.items()}
    memory = torch.frombuffer(_allocate_pages(sum(map(_aligned, sizes.values()))), dtype=torch.uint8)
    buffers, start = {}, 0
    for name, (dtype, shape) in layout.items():
        buffers[name] = memory[start : start + sizes[name]].view(dtype).reshape(shape)
        start += _aligned(sizes[name])
    return buffers


def _allocate_pages(size_bytes: int) -> mmap.mmap:
    """Huge pages where available: they make the first save two to three times faster."""
    memory = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _memory_identity(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for two tensors only if they are the same view of the same memory."""
    place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    return (*place, tensor.is_conj(), tensor.is_neg())
