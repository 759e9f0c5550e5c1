"""Augmentations of images [samples, channels, height, width], with torchvision's names and arguments."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Generator, Tensor
from torch.nn import functional

from shoal.data.augmentations.base import (
    Augmentation,
    chosen,
    number,
    pair,
    per_sample,
    range_around,
    size_of,
    uniform,
)
from shoal.errors import error

_LUMA = (0.2989, 0.587, 0.114)
"""How much red, green and blue make grey, as in torchvision."""


class ImageAugmentation(Augmentation):
    takes = "float images [samples, channels, height, width]"
    least_dims = most_dims = 4


class RandomHorizontalFlip(ImageAugmentation):
    """Mirrors an image with probability p."""

    dim = 3

    def __init__(self, p: float = 0.5) -> None:
        self.p = number(p, "p", high=1)

    def apply(self, x: Tensor, generator: Generator) -> Tensor:
        return torch.where(per_sample(chosen(len(x), self.p, generator), x), x.flip(self.dim), x)


class RandomVerticalFlip(RandomHorizontalFlip):
    """Turns an image upside down with probability p."""

    dim = 2


class RandomCrop(ImageAugmentation):
    """A window of `size` at a random place, after `padding` pixels of `fill` on each side."""

    def __init__(self, size: Any, padding: int = 0, fill: float = 0.0) -> None:
        self.height, self.width = size_of(size, "size")
        self.padding = int(number(padding, "padding"))
        self.fill = number(fill, "fill", low=-math.inf)

    def apply(self, x: Tensor, generator: Generator) -> Tensor:
        if self.padding:
            x = functional.pad(x, (self.padding,) * 4, value=self.fill)
        spare = x.shape[2] - self.height, x.shape[3] - self.width
        if min(spare) < 0:
            raise self.misfit(f"images of {x.shape[2]} x {x.shape[3]}", fix="Crop less, or write `padding`.")
        top, left = (torch.randint(room + 1, (len(x), 1), generator=generator) for room in spare)
        rows, columns = top + torch.arange(self.height), left + torch.arange(self.width)
        samples = torch.arange(len(x))[:, None, None]
        return x.movedim(1, 3)[samples, rows[:, :, None], columns[:, None, :]].movedim(3, 1).contiguous()


class RandomRotation(ImageAugmentation):
    """Turns an image about its centre by up to `degrees`, or within a range of two numbers. What comes in is 0."""

    def __init__(self, degrees: Any, interpolation: Literal["nearest", "bilinear"] = "nearest") -> None:
        is_one = isinstance(degrees, int | float)
        self.low, self.high = (
            (-number(degrees, "degrees"), number(degrees, "degrees")) if is_one else pair(degrees, "degrees", low=-360)
        )
        if interpolation not in ("nearest", "bilinear"):
            raise error("SH205", f"'interpolation' is {interpolation!r}", fix="Use nearest or bilinear.")
        self.interpolation = interpolation

    def apply(self, x: Tensor, generator: Generator) -> Tensor:
        angle = torch.deg2rad(uniform([len(x)], self.low, self.high, generator)).to(x.dtype)
        cos, sin, aspect = torch.cos(angle), torch.sin(angle), x.shape[2] / x.shape[3]
        zero = torch.zeros_like(cos)
        rows = torch.stack([torch.stack([cos, -sin * aspect, zero], 1), torch.stack([sin / aspect, cos, zero], 1)], 1)
        grid = functional.affine_grid(rows, list(x.shape), align_corners=False)
        return functional.grid_sample(x, grid, mode=self.interpolation, padding_mode="zeros", align_corners=False)


class ColorJitter(ImageAugmentation):
    """Changes brightness, contrast and saturation, in this order, by factors around 1: 0.2 means 0.8 to 1.2. Then turns
    the hue by up to `hue` of the whole circle.

    Values stay within 0 and `max_value`. Saturation and hue are for three channels.
    """

    def __init__(
        self, brightness: Any = 0, contrast: Any = 0, saturation: Any = 0, hue: Any = 0, max_value: float = 1.0
    ) -> None:
        self.brightness = range_around(brightness, "brightness", center=1, low=0)
        self.contrast = range_around(contrast, "contrast", center=1, low=0)
        self.saturation = range_around(saturation, "saturation", center=1, low=0)
        self.hue = range_around(hue, "hue", center=0, low=-0.5, high=0.5)
        self.max_value = number(max_value, "max_value")

    def apply(self, x: Tensor, generator: Generator) -> Tensor:
        for name, has_effect in (("saturation", self.saturation != (1, 1)), ("hue", self.hue != (0, 0))):
            if has_effect and x.shape[1] != 3:
                raise self.misfit(f"{x.shape[1]} channels", fix=f"Leave `{name}` out: it is for three channels.")
        factors = (self.brightness, self.contrast, self.saturation)
        brightness, contrast, saturation = (per_sample(uniform([len(x)], *f, generator), x) for f in factors)
        x = self._blend(x, torch.zeros_like(x), brightness)
        x = self._blend(x, _grey(x).mean((1, 2, 3), keepdim=True), contrast)
        x = self._blend(x, _grey(x), saturation) if x.shape[1] == 3 else x
        return x if self.hue == (0, 0) else _turn_hue(x, per_sample(uniform([len(x)], *self.hue, generator), x))

    def _blend(self, x: Tensor, other: Tensor, factor: Tensor) -> Tensor:
        return (x * factor + other * (1 - factor)).clamp(0, self.max_value)


def _grey(x: Tensor) -> Tensor:
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    return x[:, :1] * _LUMA[0] + x[:, 1:2] * _LUMA[1] + x[:, 2:] * _LUMA[2]


def _turn_hue(x: Tensor, turn: Tensor) -> Tensor:
    """Adds `turn` to the hue of each pixel, with value and saturation of HSV as they are. A turn of 1 is the circle."""
    red, green, blue = x[:, :1], x[:, 1:2], x[:, 2:]
    value, least = x.amax(1, keepdim=True), x.amin(1, keepdim=True)
    spread = value - least
    divisor = torch.where(spread > 0, spread, torch.ones_like(spread))  # grey has no hue, and stays grey
    from_green_or_blue = torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor)
    sixths = torch.where(value == red, (green - blue) / divisor, from_green_or_blue) + 6 * turn
    place = (sixths + torch.tensor([5.0, 3.0, 1.0], dtype=x.dtype)[:, None, None]) % 6
    return value - spread * torch.minimum(place, 4 - place).clamp(0, 1)


class RandomErasing(ImageAugmentation):
    """Sets a rectangle of an image to `value` with probability p. `scale` is its part of the area, `ratio` the range
    of height by width; a rectangle that is too high or wide is cut to the image."""

    def __init__(self, p: float = 0.5, scale: Any = (0.02, 0.33), ratio: Any = (0.3, 3.3), value: float = 0.0) -> None:
        self.p = number(p, "p", high=1)
        self.scale = pair(scale, "scale", high=1)
        self.ratio = pair(ratio, "ratio", low=1e-3)
        self.value = number(value, "value", low=-math.inf)

    def apply(self, x: Tensor, generator: Generator) -> Tensor:
        count, height, width = len(x), x.shape[2], x.shape[3]
        wanted = chosen(count, self.p, generator)
        area = uniform([count], *self.scale, generator) * height * width
        ratio = torch.exp(uniform([count], math.log(self.ratio[0]), math.log(self.ratio[1]), generator))
        sides = torch.sqrt(area * ratio).round(), torch.sqrt(area / ratio).round()
        rows, columns = (
            _inside(side, size, torch.rand(count, generator=generator))
            for side, size in zip(sides, (height, width), strict=True)
        )
        mask = (rows[:, :, None] & columns[:, None, :] & wanted[:, None, None])[:, None]
        return x.masked_fill(mask, self.value)


def _inside(side: Tensor, size: int, place: Tensor) -> Tensor:
    """Which of `size` positions are in a stretch of this length that lies at this fraction of the possible places."""
    side = side.clamp(1, size)
    start = (place * (size - side + 1)).floor()[:, None]
    positions = torch.arange(size)
    return (positions >= start) & (positions < start + side[:, None])
