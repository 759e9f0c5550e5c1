"""Encoded size and residual size of each codec. Plain arithmetic, because the planner does not load torch.

Settings are a job's `codec` section as plain data: `{"kind": "int8", "block": 256}`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

FLOAT_BYTES = 4
SIGN_BLOCK = 1024
Shape = Sequence[int]


def size_bytes(settings: Mapping[str, Any], count: int, *, shapes: Iterable[Shape] = ()) -> int:
    """Encoded size of `count` float32 values. `lowrank` needs the shapes of the tensors that they make up."""
    kind = settings["kind"]
    if kind == "none":
        return FLOAT_BYTES * count
    if kind in ("bf16", "fp16"):
        return 2 * count
    if kind == "int8":
        return FLOAT_BYTES * block_count(count, settings["block"]) + count
    if kind == "int4":
        return FLOAT_BYTES * block_count(count, settings["block"]) + block_count(count, 2)
    if kind == "int3":
        return FLOAT_BYTES * block_count(count, settings["block"]) + 2 * block_count(count, 5)
    if kind == "sign":
        return FLOAT_BYTES * block_count(count, SIGN_BLOCK) + block_count(count, 8)
    if kind == "topk":
        return 2 * FLOAT_BYTES * topk_count(count, settings["keep"])
    if kind == "lowrank":
        return FLOAT_BYTES * sum(part.sent_floats for part in matrix_segments(shapes, settings["rank"], count))
    raise ValueError(f"there is no codec '{kind}'")


def residual_floats(settings: Mapping[str, Any], count: int, *, shapes: Iterable[Shape] = ()) -> int:
    """Float32 values that one contributor carries from step to step: the encoding error, plus codec state."""
    kind = settings["kind"]
    if kind == "none":
        return 0
    if kind == "topk" and settings.get("momentum"):
        return 2 * count
    if kind == "lowrank":
        return count + sum(part.columns * part.rank for part in matrix_segments(shapes, settings["rank"], count))
    return count


def block_count(count: int, block: int) -> int:
    return -(-count // block)


def topk_count(count: int, keep: float) -> int:
    """Number of values that top-k sends: at least one."""
    return min(count, max(1, round(count * keep)))


@dataclass(frozen=True)
class MatrixSegment:
    """A range of values: a matrix that is sent as two thin matrices, or (rank 0) values that are sent unchanged."""

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
    def sent_floats(self) -> int:
        """Number of floats in the encoded segment."""
        return self.rank * (self.rows + self.columns) if self.rank else self.count


def matrix_segments(shapes: Iterable[Shape], rank: int, count: int) -> list[MatrixSegment]:
    """The segments of values that hold tensors of these shapes one after the other.

    A tensor is a matrix with a row for each index of its first dimension. It is sent unchanged if two thin matrices of
    this rank would not be smaller; neighbouring unchanged tensors become one segment.
    """
    segments: list[MatrixSegment] = []
    offset = 0
    for shape in shapes:
        size = prod(shape)
        rows = shape[0] if len(shape) > 1 and size else 1
        matrix = MatrixSegment(offset, rows, size // rows, rank)
        if matrix.sent_floats < size:
            segments.append(matrix)
        elif size:
            start = segments.pop().start if segments and not segments[-1].rank else offset
            segments.append(MatrixSegment(start, 1, offset + size - start))
        offset += size
    if offset != count:
        raise ValueError(f"the shapes hold {offset} values, but {count} are given")
    return segments


def shapes_within(shapes: Iterable[Shape], start: int, stop: int) -> Iterator[Shape]:
    """The shapes in the range [start, stop) of the values. A matrix that is cut keeps its full rows as a matrix."""
    offset = 0
    for shape in shapes:
        size = prod(shape)
        first, last = max(start, offset), min(stop, offset + size)
        if first < last:
            yield from _slice_shape(shape, first - offset, last - offset)
        offset += size


def _slice_shape(shape: Shape, first: int, last: int) -> Iterator[Shape]:
    row = prod(shape[1:])
    above, below = -first % row, last % row
    rows = (last - first - above - below) // row
    if len(shape) < 2 or rows < 1:
        yield (last - first,)
        return
    yield from ((above,),) if above else ()
    yield (rows, *shape[1:])
    yield from ((below,),) if below else ()
