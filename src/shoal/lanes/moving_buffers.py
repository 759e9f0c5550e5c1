"""The buffers of a model that its forward passes change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


class MovingBuffers:
    """The buffers that a forward pass changes (a batch norm's running statistics), found by name at each use."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.names = list(names)
        self._locations = [_locate(model, name) for name in names]
        self._is_float = [module._buffers[key].is_floating_point() for module, key in self._locations]  # type: ignore[union-attr]
        self._at_start: list[Tensor] = []

    @property
    def float_names(self) -> list[str]:
        """The names of the buffers that are averaged."""
        return [name for name, floats in zip(self.names, self._is_float, strict=True) if floats]

    @property
    def int_names(self) -> list[str]:
        return [name for name, floats in zip(self.names, self._is_float, strict=True) if not floats]

    def _current(self, is_float: bool) -> list[Tensor]:
        found = (m._buffers[k] for (m, k), f in zip(self._locations, self._is_float, strict=True) if f is is_float)
        return [buffer for buffer in found if buffer is not None]

    @torch.no_grad()
    def snapshot(self) -> None:
        """Save the values from which every lane of this step starts."""
        self._at_start = [b.clone() for b in self._current(True) + self._current(False)]

    def restore(self) -> None:
        self._copy(self._at_start)

    @torch.no_grad()
    def weighted_copies(self, share: float) -> tuple[list[Tensor], list[Tensor]]:
        return [b * share for b in self._current(True)], [b.clone() for b in self._current(False)]

    def templates(self) -> tuple[list[Tensor], list[Tensor]]:
        """Tensors with the shapes and dtypes of `weighted_copies`."""
        return self._current(True), self._current(False)

    def assign(self, float_buffers: list[Tensor], int_buffers: list[Tensor]) -> None:
        self._copy(float_buffers + int_buffers)

    def _copy(self, values: list[Tensor]) -> None:
        """Through `data`: a graph that is still needed for a later phase of the step refers to these buffers, and
        torch would refuse its backward if they had changed in its eyes."""
        for buffer, value in zip(self._current(True) + self._current(False), values, strict=True):
            buffer.data.copy_(value)


def _locate(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


def changed_buffers(model: nn.Module, before: Mapping[str, Tensor]) -> list[str]:
    """Names of the buffers whose bits differ from these copies."""
    return [name for name, buffer in model.named_buffers() if name in before and _differs(buffer, before[name])]


def _differs(a: Tensor, b: Tensor) -> bool:
    return not torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
