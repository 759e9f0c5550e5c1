"""The seam: a model of which this member holds a part, however it was cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from shoal.lanes.replica import LossFunction
from shoal.sharding.device_mesh import ShardMesh


class ShardedModel(Protocol):
    """Made on a model without memory; who made it fills it afterwards, part by part."""

    model: nn.Module
    """As this member has it. Parameters that are elsewhere have no memory here."""
    mesh: ShardMesh
    shares_lane: bool
    """Do the members of a replica work on the same lane? If not, each brings one of its own, and they all call
    `run` equally often."""

    def forward_backward(self, loss: LossFunction, batch: Any, share: float) -> tuple[Tensor, Tensor | None]:
        """Forward and backward. Leaves gradients in the model: each member those of its parts, summed over the lanes
        of all members. Returns the loss, weighed by `share`, and its count if it has one: of this member's lane, or of
        the lane they have together. With a share of 0 nothing of it counts."""

    def owner(self, name: str) -> int:
        """The seat that answers for a parameter or buffer that members have in full."""

    def forward(self, function: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
        """What `act(model, batch)` returns, without gradients. All members call it; in a pipeline the last one gets the
        result, and the others None."""
