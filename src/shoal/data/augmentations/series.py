"""Augmentations of time series [samples, time] or [samples, channels, time]."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from shoal.data.augmentations.base import Augmentation, number


class SeriesAugmentation(Augmentation):
    takes = "float series [samples, time] or [samples, channels, time]"
    least_dims, most_dims = 2, 3


class Jitter(SeriesAugmentation):
    """Adds normal noise with standard deviation sigma to every value."""

    def __init__(self, sigma: float = 0.03) -> None:
        self.sigma = number(sigma, "sigma")

    def apply(self, x: Tensor, generator: Generator) -> Tensor:
        return x + torch.randn(x.shape, generator=generator).to(x.dtype) * self.sigma


class Scaling(SeriesAugmentation):
    """Multiplies each channel of each series by a factor around 1, normal with standard deviation sigma."""

    def __init__(self, sigma: float = 0.1) -> None:
        self.sigma = number(sigma, "sigma")

    def apply(self, x: Tensor, generator: Generator) -> Tensor:
        return x * (1 + torch.randn((*x.shape[:-1], 1), generator=generator) * self.sigma).to(x.dtype)


class WindowSlice(SeriesAugmentation):
    """A window of `reduce_ratio` of the length at a random place, stretched to the whole length by linear
    interpolation."""

    def __init__(self, reduce_ratio: float = 0.9) -> None:
        self.reduce_ratio = number(reduce_ratio, "reduce_ratio", low=1e-3, high=1)

    def apply(self, x: Tensor, generator: Generator) -> Tensor:
        length = x.shape[-1]
        if length < 2:
            return x
        window = max(round(length * self.reduce_ratio), 2)
        start = torch.randint(length - window + 1, (len(x), 1), generator=generator)
        places = start + torch.arange(length) * ((window - 1) / (length - 1))
        before = places.floor().long().clamp(max=length - 2)
        weight = (places - before).to(x.dtype)
        if x.dim() == 3:
            before, weight = before[:, None].expand(-1, x.shape[1], -1), weight[:, None]
        return x.gather(-1, before) * (1 - weight) + x.gather(-1, before + 1) * weight
