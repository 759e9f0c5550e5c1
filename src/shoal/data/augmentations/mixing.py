"""Augmentations that mix each sample with another one of its lane, and their targets with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional

from shoal.data.augmentations.base import Augmentation, number, per_sample
from shoal.data.batch import Batch


class MixUp(Augmentation):
    """Each sample becomes l times itself and 1 - l times another one, with l from Beta(alpha, alpha).

    Class numbers become probabilities of `num_classes` classes, which CrossEntropyLoss takes; other targets are
    numbers.
    """

    takes = "float inputs"

    def __init__(self, alpha: float = 1.0, num_classes: int | None = None) -> None:
        self.alpha = number(alpha, "alpha", low=1e-6)
        self.num_classes = None if num_classes is None else int(number(num_classes, "num_classes", low=2))

    def __call__(self, batch: Batch, *, generator: Generator) -> Batch:
        x, target = self.checked_input(batch), self._target(batch.target)
        share = _beta(self.alpha, len(x), generator)
        partner = torch.randperm(len(x), generator=generator)
        mixed, share = self.mix(x, x[partner], share, generator)
        weight = per_sample(share, target)
        both = target * weight + target[partner] * (1 - weight)
        return replace(batch, inputs=(mixed, *batch.inputs[1:]), target=both)

    def mix(self, x: Tensor, other: Tensor, share: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        """The mixed samples, and the share that each has kept of itself."""
        weight = per_sample(share, x)
        return x * weight + other * (1 - weight), share

    def _target(self, target: Any) -> Tensor:
        if not isinstance(target, Tensor):
            raise self.misfit(f"a target of type {type(target).__name__}")
        if target.is_floating_point():
            return target
        if self.num_classes is None or target.dim() != 1:
            shown = f"class numbers {list(target.shape)}"
            raise self.misfit(shown, fix="Write `num_classes`: the number of the model's outputs.")
        if target.numel() and not 0 <= int(target.min()) <= int(target.max()) < self.num_classes:
            shown = f"class numbers from {int(target.min())} to {int(target.max())}"
            raise self.misfit(shown, fix="Give `num_classes` all classes, numbered from 0.")
        return functional.one_hot(target.long(), self.num_classes).to(torch.float32)


class CutMix(MixUp):
    """A rectangle of each image comes from another one; the targets are mixed by its area."""

    takes = "float images [samples, channels, height, width]"
    least_dims = most_dims = 4

    def mix(self, x: Tensor, other: Tensor, share: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
        height, width = x.shape[2], x.shape[3]
        side = torch.sqrt(1 - share) / 2
        inside = [
            _around(torch.randint(size, (len(x),), generator=generator), side * size, size) for size in (height, width)
        ]
        mask = (inside[0][:, :, None] & inside[1][:, None, :])[:, None]
        kept = 1 - mask.sum((1, 2, 3)).to(torch.float32) / (height * width)
        return torch.where(mask, other, x), kept


def _around(center: Tensor, half: Tensor, size: int) -> Tensor:
    """Which of `size` positions are at most `half` from the centre; those outside of the image are cut off."""
    positions = torch.arange(size)
    low, high = (center - half).round()[:, None], (center + half).round()[:, None]
    return (positions >= low) & (positions < high)


def _beta(alpha: float, count: int, generator: Generator) -> Tensor:
    """torch's own Beta distribution takes no generator."""
    seed = int(torch.randint(2**62, (), generator=generator))
    drawn = np.random.Generator(np.random.PCG64(seed)).beta(alpha, alpha, size=count)
    return torch.from_numpy(drawn).to(torch.float32)
