"""Overlap of communication with backward: gradients are sent before backward is over.

The last lane that a worker computes in a step finishes its part of the tree, parameter by parameter. Each finished
gradient is added to the earlier lanes' sum, in the order of the tree, directly in the buffer that is sent to peers on
other hosts. The finished prefix of that buffer grows while backward runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.lanes.flat_layout import TensorSlot, align_up
from shoal.lanes.replica import LaneSum

BUCKET_BYTES = 1 << 20  # measured at 1 Gbit/s: smaller ones are not faster, larger ones are slower

Addends = Sequence[tuple[list[Tensor], bool]]
"""Gradients that the lane's are added to, in this order; True: they are the left operand."""


def is_worth_overlapping(size_bytes: int) -> bool:
    """Whether any part of a buffer of this size would be sent before backward ends."""
    return size_bytes > BUCKET_BYTES


@dataclass
class SinkState:
    """Progress of one overlapped send. Sent bytes cannot be recalled: if they turn out wrong, the step is discarded."""

    missing: set[int]
    invalid_reason: str = ""

    def invalidate(self, why: str) -> None:
        self.invalid_reason = self.invalid_reason or why

    def validate(self, total: LaneSum | None, *, counted: bool) -> str:
        """After backward: '' or why the step must be discarded. `total` is the sum that includes the lane; `counted`
        is what the frame sent before said of it."""
        if total is None or total.grads or self.missing:
            self.invalidate("not all gradients were sent during backward")
        elif (total.count is not None) != counted:
            self.invalidate("the loss has a count of its own in one step and none in another")
        return self.invalid_reason


class OverlappedSend:
    """A gradient sink for one lane. It calls `on_ready(until)` when the first `until` bytes are complete."""

    def __init__(
        self,
        out: list[Tensor],
        slots: Sequence[TensorSlot],
        addends: Addends,
        *,
        state: SinkState,
        on_ready: Callable[[int], None],
    ) -> None:
        self.invalidate = state.invalidate
        self._out = out
        self._addends = addends
        self._state = state
        self._on_ready = on_ready
        self._prefix = _contiguous_prefix(slots)
        self._next = 0
        self._reported_bytes = 0

    def accept(self, index: int, grad: Tensor | None) -> None:
        """Take a complete gradient, which the sink may change from now on. None counts as zero."""
        if index in self._state.missing and not self._state.invalid_reason:
            self._add_and_store(index, torch.zeros_like(self._out[index]) if grad is None else grad)
        elif grad is not None:
            self.invalidate("a parameter's gradient came in more than one part")

    def _add_and_store(self, index: int, value: Tensor) -> None:
        out = self._out[index]
        if (value.layout, value.dtype, value.shape) != (torch.strided, out.dtype, out.shape):
            self.invalidate("a gradient's layout, dtype or shape differs from its parameter's")
            return
        for grads, comes_first in self._addends[:-1]:
            value = grads[index].add_(value) if comes_first else value.add_(grads[index])
        if self._addends:
            grads, comes_first = self._addends[-1]
            torch.add(*((grads[index], value) if comes_first else (value, grads[index])), out=out)
        else:
            out.copy_(value)
        self._state.missing.remove(index)
        self._report_ready()

    def _report_ready(self) -> None:
        """Report the bytes before the first missing gradient, a bucket at a time."""
        until = self._reported_bytes
        while self._next < len(self._prefix) and self._prefix[self._next][0] not in self._state.missing:
            until = self._prefix[self._next][1]
            self._next += 1
        if until - self._reported_bytes >= BUCKET_BYTES:
            self._reported_bytes = until
            self._on_ready(until)


def _contiguous_prefix(slots: Sequence[TensorSlot]) -> list[tuple[int, int]]:
    """The gradients at the front of the buffer that follow each other without a hole, and where each ends."""
    prefix, end = list[tuple[int, int]](), 0
    for i in sorted(range(len(slots)), key=lambda i: (slots[i].start, slots[i].size_bytes)):
        if slots[i].start != end:
            break
        end = align_up(end + slots[i].size_bytes)
        prefix.append((i, end))
    return prefix
