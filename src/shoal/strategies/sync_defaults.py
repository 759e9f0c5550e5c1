"""Defaults of gradient syncs in which every replica takes every step with all others, and holds the whole state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shoal.collectives.group import ViewGroup
from shoal.lanes.lane_sum import LaneSum, add
from shoal.lanes.reduction_tree import TreeSum
from shoal.lanes.replica import GradientSink
from shoal.strategies.base import HeldWeights

NO_SAMPLES = "no lane had samples"
OnTotal = Callable[[int, LaneSum], None]
"""Called with the total of each step before it is applied."""


class SyncDefaults:
    def __init__(self, lanes: int, group: ViewGroup, on_total: OnTotal | None) -> None:
        self._lanes = lanes
        self.group = self._group = group
        self._on_total = on_total

    def begin_step(self) -> TreeSum[LaneSum]:
        return TreeSum(self._lanes, add)

    def gradient_sink(
        self, held: HeldWeights, step: int, sums: TreeSum[LaneSum], lane: int, *, halt: bool
    ) -> GradientSink | None:
        return None

    def _apply(self, held: HeldWeights, step: int, total: LaneSum) -> Tensor:
        if self._on_total:
            self._on_total(step, total)
        return held.apply(step, total)

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, step: int, state: dict[str, Any]) -> None:
        """Does nothing: there is no state."""

    def hand_over(self, given_up: Callable[[], bool]) -> None:
        """Does nothing: the other members hold the same state."""
