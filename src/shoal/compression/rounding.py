"""Weights of few bits: symmetric rounding with one scale per output, and its gradient for training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def round_weight(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Whole numbers from -(2 ** (bits - 1) - 1) upwards, and the scale of each output: a pure function of the
    weight."""
    most = 2 ** (bits - 1) - 1
    rows = weight.flatten(1)
    scale = rows.abs().amax(1) / most
    if bits < 4:  # the largest values stretch so few steps: the scale with the smallest error is searched
        scale = _best_scale(rows, scale, most)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    codes = (rows / scale[:, None]).round().clamp(-most, most)
    return codes.reshape(weight.shape), scale


def codes_of_rounded(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The whole numbers and scales of a weight that is rounded already: its smallest number other than zero is one of a
    few multiples of the scale. Outputs for which no scale fits are rounded."""
    codes, scale = round_weight(weight, bits)
    most, rows = 2 ** (bits - 1) - 1, weight.flatten(1)
    codes = codes.flatten(1)
    small = rows.abs().masked_fill(rows == 0, torch.inf).amin(1)
    small = torch.where(small.isfinite(), small, torch.ones_like(small))
    open_rows = torch.ones(len(rows), dtype=torch.bool)
    for multiple in range(1, most + 1):
        tried = small / multiple
        found = (rows / tried[:, None]).round()
        near = (found * tried[:, None] - rows).abs().amax(1) <= 1e-5 * rows.abs().amax(1)
        fits = open_rows & near & (found.abs().amax(1) <= most)
        codes, scale = torch.where(fits[:, None], found, codes), torch.where(fits, tried, scale)
        open_rows &= ~fits
    return codes.reshape(weight.shape), scale


def _best_scale(rows: Tensor, largest: Tensor, most: int) -> Tensor:
    best, least = largest, torch.full_like(largest, torch.inf)
    for share in range(4, 21):
        scale = largest * (share / 20)
        safe = torch.where(scale > 0, scale, torch.ones_like(scale))[:, None]
        loss = ((rows / safe).round().clamp(-most, most) * safe - rows).square().sum(1)
        best, least = torch.where(loss < least, scale, best), torch.minimum(loss, least)
    return best


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, bits: int) -> Tensor:
        codes, scale = round_weight(weight, bits)
        return codes * scale.reshape(-1, *(1 for _ in weight.shape[1:]))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class Rounded(nn.Module):
    """The rounded weight. Its gradient goes to the weight unchanged."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def forward(self, weight: Tensor) -> Tensor:
        found: Tensor = _StraightThrough.apply(weight, self.bits)  # type: ignore[no-untyped-call]
        return found


def share_weight(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The number of a value for each weight, and the 2 ** bits values: k-means on a line, from values at equal
    distances, in float64. If there are zeros, value 0 is zero and stays so."""
    flat = weight.detach().double().flatten().cpu()
    has_zeros = bool((flat == 0).any())
    others = flat[flat != 0] if has_zeros else flat
    count = 2**bits - int(has_zeros)
    centres = _line_means(others.sort().values, count) if len(others) else torch.zeros(count, dtype=torch.float64)
    values = torch.cat([torch.zeros(1, dtype=torch.float64), centres]) if has_zeros else centres
    codes = torch.bucketize(flat, (centres[1:] + centres[:-1]) / 2)
    if has_zeros:
        codes = torch.where(flat == 0, 0, codes + 1)
    return codes.to(torch.uint8).reshape(weight.shape), values.to(weight.dtype)


def _line_means(ordered: Tensor, count: int) -> Tensor:
    """Lloyd's algorithm on sorted values: each group is an interval, so sums are differences of a running sum."""
    centres = torch.linspace(float(ordered[0]), float(ordered[-1]), count, dtype=torch.float64)
    running = torch.cat([torch.zeros(1, dtype=torch.float64), ordered.cumsum(0)])
    for _ in range(100):
        edges = torch.searchsorted(ordered, (centres[1:] + centres[:-1]) / 2)
        edges = torch.cat([torch.tensor([0]), edges, torch.tensor([len(ordered)])])
        sizes = edges[1:] - edges[:-1]
        means = (running[edges[1:]] - running[edges[:-1]]) / sizes.clamp(min=1)
        moved = torch.where(sizes > 0, means, centres)
        if torch.equal(moved, centres):
            break
        centres = moved
    return centres


class Shared(nn.Module):
    """A weight that is looked up in a list of values. The values are trained, the numbers are fixed; value 0 of a
    weight with zeros gets no gradient."""

    codes: Tensor
    has_zeros: Tensor

    def __init__(self, weight: Tensor, bits: int) -> None:
        super().__init__()
        self.bits = bits
        codes, _ = share_weight(weight, bits)
        self.register_buffer("codes", codes.to(weight.device))
        self.register_buffer("has_zeros", (weight.detach() == 0).any().to(weight.dtype))

    def forward(self, values: Tensor) -> Tensor:
        zeroed = torch.cat([values[:1] * (1 - self.has_zeros), values[1:]])
        return zeroed[self.codes.long()]

    def right_inverse(self, weight: Tensor) -> Tensor:
        return share_weight(weight, self.bits)[1].to(weight.device)
