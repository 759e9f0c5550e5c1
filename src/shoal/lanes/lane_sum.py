"""What lanes add up to."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.lanes.sparse import rows as sparse


@dataclass
class LaneSum:
    """What a lane, or a block of lanes, adds up to.

    `averaged` are the moving float buffers times the lane's share; `first` are the other moving buffers, of which
    the lowest lane's count. `count` is there when the loss came as a sum with a divisor of its own. `grads` are empty
    where a taker has them. `rows` are gradients of rows, for each sparse table.
    """

    grads: list[Tensor]
    float_buffers: list[Tensor]
    int_buffers: list[Tensor]
    loss: Tensor
    count: Tensor | None = None
    rows: list[sparse.SparseRows] = field(default_factory=list)


def add(left: LaneSum, right: LaneSum) -> LaneSum:
    """left + right, in the memory of left."""
    if left.grads:
        torch._foreach_add_(left.grads, right.grads)
    if left.float_buffers:
        torch._foreach_add_(left.float_buffers, right.float_buffers)
    left.loss += right.loss
    if left.count is not None and right.count is not None:
        left.count += right.count
    if left.rows:
        left.rows = [sparse.add_rows(a, b) for a, b in zip(left.rows, right.rows, strict=True)]
    return left
