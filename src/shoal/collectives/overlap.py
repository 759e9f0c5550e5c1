"""Gradients that leave before backward is over.

The last lane that a worker computes in a step finishes its part of the tree, parameter by parameter. Each finished
gradient is added to what the earlier lanes left, in the order of the tree, straight into the stretch that peers on
other hosts are sent; how far that is ready moves on while backward goes on.
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
"""Gradients that the lane's are added to, one after the other; True: they stand on the left."""


def is_worth_overlapping(size_bytes: int) -> bool:
    """Would anything of such a stretch leave before the end?"""
    return size_bytes > BUCKET_BYTES


@dataclass
class SinkState:
    """How far it has come. Nothing can be called back: if what was taken turns out wrong, the step must not count."""

    missing: set[int]
    invalid_reason: str = ""

    def invalidate(self, why: str) -> None:
        self.invalid_reason = self.invalid_reason or why

    def validate(self, total: LaneSum | None, *, counted: bool) -> str:
        """At the end: '' or why it cannot stand. `total` is the sum that the lane went into; what went ahead said
        whether it is `counted`."""
        if total is None or total.grads or self.missing:
            self.invalidate("not all gradients went ahead")
        elif (total.count is not None) != counted:
            self.invalidate("the loss has a count of its own in one step and none in another")
        return self.invalid_reason


class OverlappedSend:
    """A Taker for one lane. `ready(until)` is told now and then that the first `until` bytes are there."""

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
        """`grad` is complete, and nobody else's any more. Without one, zero stands for what did not come."""
        if index in self._state.missing and not self._state.invalid_reason:
            self._add_and_store(index, torch.zeros_like(self._out[index]) if grad is None else grad)
        elif grad is not None:
            self.invalidate("a parameter's gradient came in more than one part")

    def _add_and_store(self, index: int, value: Tensor) -> None:
        place = self._out[index]
        if (value.layout, value.dtype, value.shape) != (torch.strided, place.dtype, place.shape):
            self.invalidate("a gradient is not of the kind that its parameter has")
            return
        for there, comes_first in self._addends[:-1]:
            value = there[index].add_(value) if comes_first else value.add_(there[index])
        if self._addends:
            there, comes_first = self._addends[-1]
            torch.add(*((there[index], value) if comes_first else (value, there[index])), out=place)
        else:
            place.copy_(value)
        self._state.missing.remove(index)
        self._report_ready()

    def _report_ready(self) -> None:
        """Only what lies in front of the first gap is ready."""
        until = self._reported_bytes
        while self._next < len(self._prefix) and self._prefix[self._next][0] not in self._state.missing:
            until = self._prefix[self._next][1]
            self._next += 1
        if until - self._reported_bytes >= BUCKET_BYTES:
            self._reported_bytes = until
            self._on_ready(until)


def _contiguous_prefix(slots: Sequence[TensorSlot]) -> list[tuple[int, int]]:
    """Which gradients lie at the front of the stretch, with nothing else between them, and where each ends."""
    found, end = list[tuple[int, int]](), 0
    for i in sorted(range(len(slots)), key=lambda i: (slots[i].start, slots[i].size_bytes)):
        if slots[i].start != end:
            break
        end = align_up(end + slots[i].size_bytes)
        found.append((i, end))
    return found
