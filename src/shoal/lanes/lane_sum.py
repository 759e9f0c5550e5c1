"""The sum over lanes: gradients, buffers, loss, count and sparse rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.errors import ShoalError, error
from shoal.lanes.sparse import rows as sparse


@dataclass
class LaneSum:
    """The sum of a lane, or of a block of lanes.

    `float_buffers` are the moving float buffers times the lane's share; `int_buffers` are the other moving buffers, and
    the lowest lane's are kept. `count` is the loss's own divisor, if it has one. `grads` is empty if a sink took them.
    `rows` are the row gradients of each sparse table.
    """

    grads: list[Tensor]
    float_buffers: list[Tensor]
    int_buffers: list[Tensor]
    loss: Tensor
    count: Tensor | None = None
    rows: list[sparse.SparseRows] = field(default_factory=list)


def mixed_counts_error() -> ShoalError:
    message = "the loss returned (sum, weight) for some lanes of a step, and a mean for others"
    return error("SH422", message, where="loss")


def add(left: LaneSum, right: LaneSum) -> LaneSum:
    """left + right, stored in left. SH422 if only one of them has a count: they have no common sum."""
    if (left.count is None) != (right.count is None):
        raise mixed_counts_error()
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
