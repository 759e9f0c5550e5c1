"""The data: MNIST and a text, the real ones if given, otherwise generated ones of the same shape."""

from __future__ import annotations

import gzip
import shutil
import struct
from pathlib import Path

import numpy as np

IMAGES, LABELS, TEXT = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz", "text.txt"
LETTERS = 65


def gather(given: Path | None, into: Path) -> Path:
    """A directory with the images, the labels and the text in it."""
    into.mkdir(parents=True, exist_ok=True)
    sources = {path.name: path for path in sorted(given.rglob("*"))} if given else {}
    texts = [path for name, path in sources.items() if "shakespeare" in name and name.endswith(".txt")]
    if IMAGES in sources and LABELS in sources:
        shutil.copy(sources[IMAGES], into / IMAGES)
        shutil.copy(sources[LABELS], into / LABELS)
    else:
        rng = np.random.default_rng(0)
        write_idx(into / IMAGES, rng.integers(0, 256, (60_000, 28, 28), dtype=np.uint8))
        write_idx(into / LABELS, rng.integers(0, 10, 60_000, dtype=np.uint8))
    if texts:
        shutil.copy(texts[0], into / TEXT)
    else:
        letters = np.random.default_rng(1).integers(48, 48 + LETTERS, 1_100_000, dtype=np.uint8)
        (into / TEXT).write_bytes(letters.tobytes())
    return into


def write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(header + array.tobytes())


def read_idx(path: Path) -> np.ndarray:
    raw = gzip.decompress(path.read_bytes())
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(struct.unpack_from(f">{raw[3]}I", raw, 4))
