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

from shoal.parallel.flat import Place, aligned
from shoal.parallel.replica import LaneSum

BUCKET_BYTES = 1 << 20  # measured at 1 Gbit/s: smaller ones are not faster, larger ones are slower

Met = Sequence[tuple[list[Tensor], bool]]
"""Gradients that the lane's are added to, one after the other; True: they stand on the left."""


def pays(size_bytes: int) -> bool:
    """Would anything of such a stretch leave before the end?"""
    return size_bytes > BUCKET_BYTES


@dataclass
class Taken:
    """How far it has come. Nothing can be called back: if what was taken turns out wrong, the step must not count."""

    missing: set[int]
    spoilt: str = ""

    def spoil(self, why: str) -> None:
        self.spoilt = self.spoilt or why

    def judge(self, total: LaneSum | None, *, counted: bool) -> str:
        """At the end: '' or why it cannot stand. `total` is the sum that the lane went into; what went ahead said
        whether it is `counted`."""
        if total is None or total.grads or self.missing:
            self.spoil("not all gradients went ahead")
        elif (total.count is not None) != counted:
            self.spoil("the loss has a count of its own in one step and none in another")
        return self.spoilt


class Ahead:
    """A Taker for one lane. `ready(until)` is told now and then that the first `until` bytes are there."""

    def __init__(
        self, room: list[Tensor], places: Sequence[Place], met: Met, *, taken: Taken, ready: Callable[[int], None]
    ) -> None:
        self.spoil = taken.spoil
        self._room = room
        self._met = met
        self._taken = taken
        self._ready = ready
        self._front = _front(places)
        self._next = 0
        self._told = 0

    def take(self, index: int, grad: Tensor | None) -> None:
        """`grad` is complete, and nobody else's any more. Without one, zero stands for what did not come."""
        if index in self._taken.missing and not self._taken.spoilt:
            self._finish(index, torch.zeros_like(self._room[index]) if grad is None else grad)
        elif grad is not None:
            self.spoil("a parameter's gradient came in more than one part")

    def _finish(self, index: int, value: Tensor) -> None:
        place = self._room[index]
        if (value.layout, value.dtype, value.shape) != (torch.strided, place.dtype, place.shape):
            self.spoil("a gradient is not of the kind that its parameter has")
            return
        for there, comes_first in self._met[:-1]:
            value = there[index].add_(value) if comes_first else value.add_(there[index])
        if self._met:
            there, comes_first = self._met[-1]
            torch.add(*((there[index], value) if comes_first else (value, there[index])), out=place)
        else:
            place.copy_(value)
        self._taken.missing.remove(index)
        self._move_on()

    def _move_on(self) -> None:
        """Only what lies in front of the first gap is ready."""
        until = self._told
        while self._next < len(self._front) and self._front[self._next][0] not in self._taken.missing:
            until = self._front[self._next][1]
            self._next += 1
        if until - self._told >= BUCKET_BYTES:
            self._told = until
            self._ready(until)


def _front(places: Sequence[Place]) -> list[tuple[int, int]]:
    """Which gradients lie at the front of the stretch, with nothing else between them, and where each ends."""
    found, end = list[tuple[int, int]](), 0
    for i in sorted(range(len(places)), key=lambda i: (places[i].start, places[i].size_bytes)):
        if places[i].start != end:
            break
        end = aligned(end + places[i].size_bytes)
        found.append((i, end))
    return found
