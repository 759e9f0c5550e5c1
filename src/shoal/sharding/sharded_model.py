"""The interface of a model of which this rank holds a shard, and its implementation for models that run as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoal.lanes.loss import LossFunction, split_loss
from shoal.sharding.device_mesh import ShardMesh


class ShardedModel(Protocol):
    """Made from a model on the meta device; its initial weights are loaded afterwards, tensor by tensor."""

    model: nn.Module
    """This rank's model. Parameters that only other ranks hold are on the meta device."""
    mesh: ShardMesh
    shares_lane: bool
    """Whether the ranks of a replica run the same lane. If not, each runs its own, and all call `forward_backward`
    equally often."""

    def forward_backward(self, loss: LossFunction, batch: Any, share: float) -> tuple[Tensor, Tensor | None]:
        """Run forward and backward, and leave gradients in the model: on each rank those of its shards, summed over the
        lanes of all ranks. Returns the loss, weighted by `share`, and its count, if it has one, of this rank's lane or
        of the shared lane. A share of 0 makes all of it zero."""

    def owner(self, name: str) -> int:
        """The shard rank that owns a parameter or buffer that several ranks hold in full."""

    def forward(self, function: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
        """The result of `function(model, batch)`, without gradients. All ranks call it; in a pipeline the last stage
        gets the result, and the others None."""


class CallableShardedModel:
    """See ShardedModel. Base of models that every rank can call as if it held the whole."""

    model: nn.Module

    def forward_backward(self, loss: LossFunction, batch: Any, share: float) -> tuple[Tensor, Tensor | None]:
        value, count = split_loss(loss(self.model, batch))
        weight = share if count is None else float(share > 0)
        value.backward(torch.tensor(weight, dtype=value.dtype))  # type: ignore[no-untyped-call]
        return value.detach().double() * weight, None if count is None else count * weight

    def owner(self, name: str) -> int:
        return 0

    @torch.no_grad()
    def forward(self, function: Callable[[nn.Module, Any], Any], batch: Any) -> Any:
        return function(self.model, batch)
