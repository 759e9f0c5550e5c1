"""Augmentations of tables and of texts."""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from shoal.data.augmentations.base import Augmentation, number


class GaussianNoise(Augmentation):
    """Adds normal noise to every value."""

    takes = "floats"

    def __init__(self, mean: float = 0.0, sigma: float = 0.1) -> None:
        self.mean, self.sigma = number(mean, "mean", low=-math.inf), number(sigma, "sigma")

    def apply(self, x: Tensor, generator: Generator) -> Tensor:
        return x + (torch.randn(x.shape, generator=generator) * self.sigma + self.mean).to(x.dtype)


class SwapNoise(Augmentation):
    """Replaces each value, with probability p, by the value that another row of the lane has in the same column."""

    takes = "rows of floats [samples, columns]"
    least_dims = most_dims = 2

    def __init__(self, p: float = 0.15) -> None:
        self.p = number(p, "p", high=1)

    def apply(self, x: Tensor, generator: Generator) -> Tensor:
        swapped = torch.rand(x.shape, generator=generator) < self.p
        rows = torch.randint(len(x), tuple(x.shape), generator=generator)
        return torch.where(swapped, x.gather(0, rows), x)


class TokenDropout(Augmentation):
    """Replaces each token, with probability p, by `token`. The target stays as it is."""

    takes = "tokens as whole numbers [samples, length]"
    least_dims = most_dims = 2
    takes_floats = False

    def __init__(self, p: float = 0.1, token: int = 0) -> None:
        self.p = number(p, "p", high=1)
        self.token = int(number(token, "token"))

    def apply(self, x: Tensor, generator: Generator) -> Tensor:
        return x.masked_fill(torch.rand(x.shape, generator=generator) < self.p, self.token)
