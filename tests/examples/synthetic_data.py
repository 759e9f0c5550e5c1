"""Tiny files in the formats that the examples read."""

import csv
import datetime
import gzip
import math
import random
import struct
from pathlib import Path


def mnist(folder: Path) -> None:
    """Digits as bars: the brighter column tells the class."""
    folder.mkdir()
    chance = random.Random(0)
    for name, count in (("train", 400), ("t10k", 80)):
        labels = [i % 10 for i in range(count)]
        pixels = bytes(
            255 if column // 2 - 2 == label else chance.randrange(60)
            for label in labels
            for _ in range(28)
            for column in range(28)
        )
        _idx(folder / f"{name}-images-idx3-ubyte.gz", (count, 28, 28), pixels)
        _idx(folder / f"{name}-labels-idx1-ubyte.gz", (count,), bytes(labels))


def _idx(path: Path, shape: tuple[int, ...], values: bytes) -> None:
    head = struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape)
    path.write_bytes(gzip.compress(head + values))


def text(path: Path) -> None:
    path.parent.mkdir()
    path.write_text("To be, or not to be, that is the question.\n" * 100)


def hourly(path: Path, *, rows: int) -> None:
    """Seven columns that go up and down once a day."""
    path.parent.mkdir()
    chance, start = random.Random(0), datetime.datetime(2024, 1, 1)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["date", "HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT"])
        for hour in range(rows):
            wave = 10 * math.sin(hour * math.tau / 24)
            values = [round(20 + wave + chance.gauss(0, 0.3), 3) for _ in range(7)]
            writer.writerow([start + datetime.timedelta(hours=hour), *values])


def table(path: Path) -> None:
    """scikit-learn's breast cancer data as somebody would have it in a file."""
    from sklearn.datasets import load_breast_cancer

    found = load_breast_cancer()
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*found.feature_names, "diagnosis"])
        writer.writerows([*row, found.target_names[kind]] for row, kind in zip(found.data, found.target, strict=True))
