"""Randomness belongs to a lane at a step, never to a worker."""

from __future__ import annotations

import random

import numpy as np
import torch

from shoal.spec.seeds import mix


def seed_everything(seed: int, device: torch.device) -> None:
    """Set every global generator that a model may draw from. About 8 µs, so that each lane can have its own."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def seed_from(device: torch.device, *numbers: int) -> None:
    seed_everything(mix(*numbers), device)
