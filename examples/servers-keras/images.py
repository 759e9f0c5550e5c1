"""MNIST from a directory with its four files, or digits that are made up."""

import gzip
from pathlib import Path

import numpy as np


def digits(folder, part):
    """Images as rows of 784 numbers from 0 to 1, and labels; of the part `train` or `t10k`."""
    if folder:
        images, labels = (_idx(Path(folder), f"{part}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
        return images.reshape(-1, 784).astype(np.float32) / 255, labels.astype(np.int64)
    return _made_up(6000 if part == "train" else 1000, seed=len(part))


def _idx(folder, name):
    plain, packed = folder / name, folder / f"{name}.gz"
    content = plain.read_bytes() if plain.exists() else gzip.decompress(packed.read_bytes())
    dimensions = content[3]
    shape = np.frombuffer(content, ">u4", dimensions, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def _made_up(count, *, seed):
    """Ten patterns under a lot of noise."""
    patterns = np.random.default_rng(0).random((10, 784))
    chance = np.random.default_rng(seed)
    labels = chance.integers(0, 10, count)
    images = 0.5 * patterns[labels] + 0.5 * chance.random((count, 784))
    return images.astype(np.float32), labels
