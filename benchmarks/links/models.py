"""The models: a character GPT of 3.2 million parameters, the usual MNIST CNN (1.2 million), and an MLP (0.4
million)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from benchmarks.links.samples import IMAGES, LABELS, TEXT
from benchmarks.overhead.models import GPT

BATCH = {"gpt": 20, "cnn": 64, "mlp": 128}
CONTEXT = 64
LR = 1e-3


def gpt() -> nn.Module:
    return GPT(width=256, heads=4, depth=4, context=CONTEXT)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))


MODELS = {"gpt": gpt, "cnn": cnn, "mlp": mlp}
USUAL = ("gpt", "cnn")


def job(model: str, data: Path, **changes: Any) -> Mapping[str, Any]:
    """The job as plain data, for two workers with one lane each. Other fields have their defaults."""
    text = {"kind": "text", "path": str(data / TEXT), "context": CONTEXT, "stride": 4}
    images = {"kind": "idx", "path": str(data / IMAGES), "target": str(data / LABELS)}
    return {
        "name": model,
        "model": f"benchmarks.links.models:{model}",
        "loss": "CrossEntropyLoss",
        "optimizer": {"name": "AdamW", "args": {"lr": LR}},
        "data": {"source": text if model == "gpt" else images},
        "batch_size": BATCH[model],
        "steps": 10**6,
        "lanes": 2,
        "workers": 2,
        "export": [],
        "checkpoint": {"every": "never"},  # plain torch saves nothing either
        **changes,
    }
