"""From the sum over all lanes to the gradient that the optimizer gets: the divisor, then clipping.

A worker may hold the whole sum, or many servers may hold it in chunks, and the bits must be the same. So the total norm
is the norm of the slices' norms, with the same slices everywhere. If every tensor is a single slice, the result is that
of torch's `clip_grad_norm_`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Clipping:
    """Clip gradients by their total norm, or value by value."""

    norm: float | None = None
    value: float | None = None


def divisor_of(count: Tensor | float, dtype: torch.dtype = torch.float64) -> Tensor:
    """The divisor of sums with this count, for gradients of this dtype.

    A count of 0 (all targets of a step are ignored) divides by 1: its sums are 0, and 0 / 0 would be NaN. The divisor
    of 16-bit gradients is float32: as float16 it would overflow at 65,504.
    """
    exact = torch.as_tensor(count, dtype=torch.float64)
    return torch.where(exact == 0, 1.0, exact).to(torch.promote_types(dtype, torch.float32))


def slice_norms(slices: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each slice; slices are flat, in memory order."""
    return list(torch._foreach_norm(list(slices))) if slices else []


def clip_coefficient(
    norms: Sequence[Tensor] | Sequence[float],
    *,
    clip: float,
    count: Tensor | float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The factor for every gradient.

    `norms` are those of all slices in the order of the flat buffer, taken before the sums are divided by the loss's own
    `count`. Norms that were sent as Python numbers are converted back to `dtype`, the layout's `norm_dtype`.
    """
    if norms and isinstance(norms[0], Tensor):
        stacked = torch.stack(list(norms))  # type: ignore[arg-type]
    else:
        stacked = torch.tensor(norms, dtype=dtype)
    # the flat buffer has the last parameter first, and torch takes parameters in their order
    total = torch.linalg.vector_norm(stacked.flip(0))
    if count is not None:
        total = total / divisor_of(count).to(total.device)
    return torch.clamp(clip / (total + 1e-6), max=1.0)


def scale_gradients(
    grads: list[Tensor], *, count: Tensor | None, coefficient: Tensor | None = None, value: float | None = None
) -> None:
    """Divide, multiply and clip in place. `count` and `coefficient` are tensors, because torch rounds a Python number
    differently for 16-bit gradients."""
    # a gradient without dimensions would be promoted to the coefficient's dtype
    grads = [grad if grad.dim() else grad.view(1) for grad in grads]
    if count is not None:
        torch._foreach_div_(grads, count)
    if coefficient is not None:
        torch._foreach_mul_(grads, coefficient)
    if value is not None:
        torch._foreach_clamp_min_(grads, -value)
        torch._foreach_clamp_max_(grads, value)
