"""How many bytes a codec sends and how much it keeps in memory: arithmetic alone, for planners that have no torch.

Settings are a job's `codec` section as plain data: `{"kind": "int8", "block": 256}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

FLOAT = 4
SIGN_BLOCK = 1024
Shape = Sequence[int]


def size_bytes(settings: Mapping[str, Any], count: int, *, shapes: Iterable[Shape] = ()) -> int:
    """What `count` float32 values take when they are sent. `lowrank` needs the shapes of what lies in the stretch."""
    kind = settings["kind"]
    if kind == "none":
        return FLOAT * count
    if kind in ("bf16", "fp16"):
        return 2 * count
    if kind == "int8":
        return FLOAT * blocks(count, settings["block"]) + count
    if kind == "int4":
        return FLOAT * blocks(count, settings["block"]) + blocks(count, 2)
    if kind == "int3":
        return FLOAT * blocks(count, settings["block"]) + 2 * blocks(count, 5)
    if kind == "sign":
        return FLOAT * blocks(count, SIGN_BLOCK) + blocks(count, 8)
    if kind == "topk":
        return 2 * FLOAT * kept(count, settings["keep"])
    if kind == "lowrank":
        return FLOAT * sum(part.floats for part in cut(shapes, settings["rank"], count))
    raise ValueError(f"there is no codec '{kind}'")


def memory_floats(settings: Mapping[str, Any], count: int, *, shapes: Iterable[Shape] = ()) -> int:
    """How many float32 values one contributor carries from step to step: what was not sent, and more in some."""
    kind = settings["kind"]
    if kind == "none":
        return 0
    if kind == "topk" and settings.get("momentum"):
        return 2 * count
    if kind == "lowrank":
        return count + sum(part.columns * part.rank for part in cut(shapes, settings["rank"], count))
    return count


def blocks(count: int, block: int) -> int:
    return -(-count // block)


def kept(count: int, keep: float) -> int:
    """How many values top-k sends: at least one of any."""
    return min(count, max(1, round(count * keep)))


@dataclass(frozen=True)
class Part:
    """A run of values in a stretch: a matrix that is sent as two thin ones, or (rank 0) values sent as they are."""

    start: int
    rows: int
    columns: int
    rank: int = 0

    @property
    def count(self) -> int:
        return self.rows * self.columns

    @property
    def stop(self) -> int:
        return self.start + self.count

    @property
    def floats(self) -> int:
        """How many it sends."""
        return self.rank * (self.rows + self.columns) if self.rank else self.count


def cut(shapes: Iterable[Shape], rank: int, count: int) -> list[Part]:
    """The parts of a stretch that holds tensors of these shapes one after the other.

    A tensor is a matrix with a row for each index of its first dimension. It is sent as it is where two thin matrices
    of this rank would not be fewer numbers; neighbours of that kind become one part.
    """
    parts: list[Part] = []
    place = 0
    for shape in shapes:
        size = prod(shape)
        rows = shape[0] if len(shape) > 1 and size else 1
        matrix = Part(place, rows, size // rows, rank)
        if matrix.floats < size:
            parts.append(matrix)
        elif size:
            start = parts.pop().start if parts and not parts[-1].rank else place
            parts.append(Part(start, 1, place + size - start))
        place += size
    if place != count:
        raise ValueError(f"the shapes hold {place} values, the stretch {count}")
    return parts


def within(shapes: Iterable[Shape], start: int, stop: int) -> Iterator[Shape]:
    """The shapes in a piece [start, stop) of the stretch: a matrix that is cut keeps its whole rows as a matrix."""
    place = 0
    for shape in shapes:
        size = prod(shape)
        first, last = max(start, place), min(stop, place + size)
        if first < last:
            yield from _slice(shape, first - place, last - place)
        place += size


def _slice(shape: Shape, first: int, last: int) -> Iterator[Shape]:
    row = prod(shape[1:])
    above, below = -first % row, last % row
    rows = (last - first - above - below) // row
    if len(shape) < 2 or rows < 1:
        yield (last - first,)
        return
    yield from ((above,),) if above else ()
    yield (rows, *shape[1:])
    yield from ((below,),) if below else ()
