"""Copies of batches to a GPU that run while it computes.

A batch goes through page-locked memory on a stream of its own. Computation waits for the copy, the host for neither.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.data.batch import Batch


class DeviceCopies:
    """Belongs to the training thread. `cuda` is torch.cuda."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._stream: Any = None

    def __call__(self, batch: Batch) -> Batch:
        if self._device.type == "cpu":
            return batch
        if self._device.type != "cuda":
            return batch.to(self._device)
        self._stream = self._stream or self._cuda.Stream(self._device)
        computes = self._cuda.current_stream(self._device)
        with self._cuda.stream(self._stream):
            # torch keeps page-locked memory until the copy has read it
            moved = batch.pin().to(self._device, non_blocking=True)
        computes.wait_stream(self._stream)

        def in_use(tensor: Tensor) -> Tensor:
            tensor.record_stream(computes)  # its memory must not be reused on the other stream while this one reads it
            return tensor

        return moved.map_tensors(in_use)
