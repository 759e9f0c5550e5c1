"""A small convolutional network, and a function that shifts images at random."""

import torch
from torch import nn
from torch.nn import functional as F

from shoal import Batch


def block(channels_in, channels_out):
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


class Net(nn.Sequential):
    def __init__(self, width=16):
        super().__init__(
            block(1, width),
            block(width, 2 * width),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(2 * width * 7 * 7, 10),
        )


def shift(batch, generator, by=2):
    """Each image moves by up to `by` pixels. All that is random comes from the generator that is given."""
    images = batch.inputs[0]
    count, _, height, width = images.shape
    down, right = torch.randint(0, 2 * by + 1, (2, count, 1), generator=generator)
    rows = (torch.arange(height) + down)[:, :, None]
    columns = (torch.arange(width) + right)[:, None, :]
    padded = F.pad(images[:, 0], [by] * 4)
    moved = padded[torch.arange(count)[:, None, None], rows, columns]
    return Batch((moved[:, None],), batch.target, batch.size)
