"""From the sum over all lanes to the gradient that the optimizer gets: the divisor, then clipping.

The sum may lie in one place, or in chunks on many servers, and the bits must be the same. So the total norm is the norm
of the norms of slices, which are cut alike everywhere. Where every tensor is a single slice, that is what torch's
`clip_grad_norm_` computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Clipping:
    """By the total norm of all gradients, or value by value."""

    norm: float | None = None
    value: float | None = None


def slice_norms(slices: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each slice; slices are flat, as they lie in memory."""
    return list(torch._foreach_norm(list(slices))) if slices else []


def clip_coefficient(
    norms: Sequence[Tensor] | Sequence[float],
    *,
    clip: float,
    count: Tensor | float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """What every gradient is to be multiplied by.

    `norms` are those of all slices in the order of the stretch, taken before the sums are divided by the loss's own
    `count`. Norms that travelled as numbers become again what they were: `dtype` is the layout's `norm_dtype`.
    """
    if norms and isinstance(norms[0], Tensor):
        stacked = torch.stack(list(norms))  # type: ignore[arg-type]
    else:
        stacked = torch.tensor(norms, dtype=dtype)
    # the stretch has the last parameter first, and torch takes them in their order
    total = torch.linalg.vector_norm(stacked.flip(0))
    if count is not None:
        total = total / torch.as_tensor(count, dtype=torch.float64, device=total.device)
    return torch.clamp(clip / (total + 1e-6), max=1.0)


def scale_gradients(
    grads: list[Tensor], *, count: Tensor | None, coefficient: Tensor | None = None, value: float | None = None
) -> None:
    """Divide, multiply and clip in place. `count` and `coefficient` are tensors: a Python number would be rounded
    otherwise with gradients of 16 bits."""
    # without dimensions, a gradient would be promoted to the coefficient's dtype
    grads = [grad if grad.dim() else grad.view(1) for grad in grads]
    if count is not None:
        torch._foreach_div_(grads, count)
    if coefficient is not None:
        torch._foreach_mul_(grads, coefficient)
    if value is not None:
        torch._foreach_clamp_min_(grads, -value)
        torch._foreach_clamp_max_(grads, value)
