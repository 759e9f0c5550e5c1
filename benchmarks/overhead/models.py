"""The models of the benchmark, with a stopwatch inside.

The same module object is trained by Shoal and by the plain loops, so the stopwatch sees both in the same way: it
counts forward passes and records wall and processor time at the first and the last pass of the window.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Stopwatch(nn.Module):
    """Times a model from its forward pass number `first` to number `last`, then writes the report."""

    def __init__(self, model: nn.Module, *, first: int, last: int, report: str) -> None:
        super().__init__()
        self.model = model
        self.calls = 0
        self.first, self.last, self.report = first, last, report

    def forward(self, x: Tensor) -> Any:
        if self.calls == self.first:
            self.start = time.perf_counter(), time.process_time()
        elif self.calls == self.last:
            wall_s, cpu_s = time.perf_counter() - self.start[0], time.process_time() - self.start[1]
            Path(self.report).write_text(json.dumps({"wall_s": wall_s, "cpu_s": cpu_s}))
        self.calls += 1
        return self.model(x)


def timed(model: str, **window: Any) -> Stopwatch:
    """A model by its name, with a stopwatch around it."""
    return Stopwatch(MODELS[model](), **window)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 49, 10),
    )  # fmt: skip


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, t, width))
        grown: Tensor = x + self.feed(self.between(x))
        return grown


class GPT(nn.Module):
    """0.8 million parameters: the usual small character model for a CPU."""

    def __init__(self, *, vocabulary: int = 65, context: int = 64, width: int = 128, heads: int = 4, depth: int = 4):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(torch.arange(x.shape[1]))
        scores: Tensor = self.head(self.norm(self.blocks(self.tokens(x) + places)))
        return scores.transpose(1, 2)


MODELS = {"mlp": mlp, "cnn": cnn, "gpt": GPT}
