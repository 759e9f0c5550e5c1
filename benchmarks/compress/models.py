"""The models of the benchmark."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.data.batch import Batch


def as_image(batch: Batch) -> Batch:
    """One channel. The source gives pixels from 0 to 1."""
    return Batch((batch.inputs[0].reshape(batch.size, 1, 28, 28),), batch.target, batch.size)


class Digits(nn.Sequential):
    """Three dense layers for images of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


class LeNet300(nn.Module):
    """LeNet-300-100: three dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


class WideMlp(nn.Module):
    """Three dense layers, wide enough that their products take most of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


class LeNet5(nn.Module):
    """LeNet-5 as in Caffe: two convolutions, two dense layers, 431,080 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 20, 5),
            nn.MaxPool2d(2),
            nn.Conv2d(20, 50, 5),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(800, 500),
            nn.ReLU(),
            nn.Linear(500, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


class Cnn(nn.Module):
    """Three convolutions with batch norm."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        sizes = (1, width, 2 * width, 4 * width)
        blocks = [
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
            for a, b in itertools.pairwise(sizes)
        ]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(sizes[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return found


class GptBlock(nn.Module):
    """Attention and a dense part, each added to what it reads. Its heads are as many as its layers are wide for."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, -1, self.head_width).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, -1))
        found: Tensor = x + self.mlp(self.norm2(x))
        return found


class Gpt(nn.Module):
    """A character GPT."""

    def __init__(
        self, vocabulary: int = 256, context: int = 64, width: int = 96, heads: int = 4, layers: int = 3
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(GptBlock(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        found: Tensor = self.head(self.norm(self.blocks(h)))
        return found
