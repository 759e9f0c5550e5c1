"""A text and images: the real ones if given, otherwise generated ones that a model can learn something from."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.overhead.samples import IMAGES, LABELS, TEXT, gather, write_idx

__all__ = ["IMAGES", "LABELS", "TEXT", "prepare"]

LETTERS = 65
NOISE = 0.3


def prepare(given: Path | None, into: Path) -> Path:
    """A directory with the images, the labels and the text in it."""
    if given:
        return gather(given, into)
    into.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 20_000, dtype=np.uint8)
    drawn = rng.random((10, 28, 28))[labels] * (1 - NOISE) + rng.random((len(labels), 28, 28)) * NOISE
    write_idx(into / IMAGES, (255 * drawn).astype(np.uint8))
    write_idx(into / LABELS, labels)
    (into / TEXT).write_bytes(markov_text(rng, 400_000).astype(np.uint8).tobytes())
    return into


def markov_text(rng: np.random.Generator, length: int) -> np.ndarray:
    """Random letters whose probabilities depend on the last two letters."""
    likely = rng.integers(0, LETTERS, (LETTERS, LETTERS, 8))
    choices, found = rng.geometric(0.4, length) - 1, [0, 0]
    for choice in choices.tolist():
        found.append(int(likely[found[-2], found[-1], min(choice, 7)]))
    return np.asarray(found[2:]) + 48
