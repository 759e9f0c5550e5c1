"""Servers update parameters in slices, so their optimizers must be elementwise."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.spec.chunk_table import BOUNDARY_ALIGN_BYTES
from shoal.spec.job import ELEMENTWISE_OPTIMIZERS

_STEPS = 3


def is_known_elementwise(optimizer: type[torch.optim.Optimizer]) -> bool:
    """Whether it is one of torch's own elementwise optimizers."""
    return optimizer.__name__ in ELEMENTWISE_OPTIMIZERS and optimizer is getattr(torch.optim, optimizer.__name__)


def make_optimizer(
    optimizer: type[torch.optim.Optimizer], hyper: Sequence[dict[str, Any]], parameters: Sequence[list[nn.Parameter]]
) -> torch.optim.Optimizer:
    """An optimizer with these options and parameters for each of its groups."""
    given = {name: hyper[0][name] for name in inspect.signature(optimizer).parameters if name in hyper[0]}
    return optimizer([{**a, "params": b} for a, b in zip(hyper, parameters, strict=True)], **given)


def why_not_sliceable(
    optimizer: type[torch.optim.Optimizer], hyper: Sequence[dict[str, Any]], dtypes: Iterable[torch.dtype]
) -> str:
    """Why updating a parameter in slices would give other bits than updating it whole; '' if it gives the same.

    Decided by a trial, which takes milliseconds and works for the user's own optimizers too.
    """
    name = optimizer.__name__
    for dtype in dict.fromkeys(dtypes):
        for options in hyper:
            try:
                if not _sliced_update_matches(optimizer, options, dtype):
                    return f"{name} with these options does not treat every element of a {dtype} tensor alone"
            except Exception as failure:
                return f"{name} cannot update slices of a tensor: {failure}"
    return ""


def _sliced_update_matches(optimizer: type[torch.optim.Optimizer], options: dict[str, Any], dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    start, *grads = torch.randn(1 + _STEPS, 3, BOUNDARY_ALIGN_BYTES // dtype.itemsize, generator=generator).to(dtype)
    whole = nn.Parameter(start.clone())
    parts = [nn.Parameter(part.clone()) for part in _split(start)]
    one, two = make_optimizer(optimizer, [options], [[whole]]), make_optimizer(optimizer, [options], [parts])
    for grad in grads:
        whole.grad = grad.clone()
        for part, part_grad in zip(parts, _split(grad), strict=True):
            part.grad = part_grad.clone()
        one.step()
        two.step()
    pairs = [(whole.detach(), [part.detach() for part in parts])]
    for name, value in one.state[whole].items():
        pairs.append((value, [two.state[part][name] for part in parts]))
    return all(_same(value, values) for value, values in pairs)


def _split(tensor: Tensor) -> tuple[Tensor, Tensor]:
    return tensor[:2].flatten(), tensor[2:].flatten()


def _same(value: Any, values: list[Any]) -> bool:
    """Elementwise state must agree element by element; a single number must agree in both parts."""
    if isinstance(value, Tensor) and value.dim():
        return torch.equal(value.flatten().view(torch.uint8), torch.cat(values).view(torch.uint8))
    return all(bool(value == other) for other in values)
