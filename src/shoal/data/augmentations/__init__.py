"""Ready augmentations by name. Each changes a batch with numbers of the lane's generator alone, sample by sample."""

from shoal.data.augmentations.images import (
    ColorJitter,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomRotation,
    RandomVerticalFlip,
)
from shoal.data.augmentations.mixing import CutMix, MixUp
from shoal.data.augmentations.rows import GaussianNoise, SwapNoise, TokenDropout
from shoal.data.augmentations.series import Jitter, Scaling, WindowSlice

__all__ = [
    "ColorJitter",
    "CutMix",
    "GaussianNoise",
    "Jitter",
    "MixUp",
    "RandomCrop",
    "RandomErasing",
    "RandomHorizontalFlip",
    "RandomRotation",
    "RandomVerticalFlip",
    "Scaling",
    "SwapNoise",
    "TokenDropout",
    "WindowSlice",
]
