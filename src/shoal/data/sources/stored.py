"""A table read once: into memory where it is small, else into mapped files in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from shoal.data.cache import NpyWriter
from shoal.data.source import Array
from shoal.data.sources.arrays import Arrays, Held, Mapped, Rows
from shoal.data.sources.table import Converted, Layout, convert, explain
from shoal.errors import ShoalError, error


@dataclass(frozen=True)
class Block:
    """Some rows of a table; `place` says where one of them stands, for messages."""

    table: pa.Table | pa.RecordBatch
    place: Callable[[int], str]


@dataclass(frozen=True)
class Stored:
    """Inputs, target, and the numbers of the rows that were left out."""

    inputs: Array
    target: Array | None
    bad: Array


def converted(block: Block, layout: Layout, *, skip: bool) -> Converted:
    """The arrays of a block. Bad rows are marked where they may be skipped, else an error with its place."""
    try:
        result = convert(block.table, layout)
    except ShoalError as failure:
        raise failure.at(block.place(0)) from None
    if result.bad.any() and not skip:
        row = int(np.flatnonzero(result.bad)[0])
        code, message = explain(block.table, row, layout)
        raise error(code, message, where=block.place(row))
    return result


def hold(blocks: Iterable[Block], layout: Layout, *, skip: bool, where: str) -> Stored:
    """The whole table in memory."""
    parts = [converted(block, layout, skip=skip) for block in blocks]
    good = [part.good() for part in parts if not part.bad.all()]
    if not good:
        raise error("SH302", "no good row", where=where)
    _check_widths(good, where)
    targets = [part.target for part in good if part.target is not None]
    bad = np.flatnonzero(np.concatenate([part.bad for part in parts]))
    return Stored(np.concatenate([part.inputs for part in good]), np.concatenate(targets) if targets else None, bad)


def write(directory: Path, blocks: Iterable[Block], layout: Layout, *, skip: bool) -> None:
    """The table as files that `load` maps."""
    bad: list[Array] = [np.zeros(0, dtype=np.int64)]
    rows = 0
    with ExitStack() as files:
        inputs = files.enter_context(NpyWriter(directory / "inputs.npy"))
        target = files.enter_context(NpyWriter(directory / "target.npy"))
        for block in blocks:
            part = converted(block, layout, skip=skip)
            bad.append(np.flatnonzero(part.bad) + rows)
            rows += len(part.bad)
            if not part.bad.all():
                good = part.good()
                inputs.append(good.inputs)
                if good.target is not None:
                    target.append(good.target)
    np.save(directory / "bad.npy", np.concatenate(bad))


def load(directory: Path, layout: Layout, *, where: str) -> Stored:
    """What `write` wrote."""
    inputs = directory / "inputs.npy"
    if inputs.stat().st_size == 0:
        raise error("SH302", "no good row", where=where)
    target = None if layout.target_type == "none" else np.load(directory / "target.npy", mmap_mode="r")
    return Stored(np.load(inputs, mmap_mode="r"), target, np.load(directory / "bad.npy"))


def _check_widths(parts: list[Converted], where: str) -> None:
    widths = {part.inputs.shape[1] for part in parts}
    if len(widths) > 1:
        raise error("SH306", f"rows of different lengths: {sorted(widths)[:5]}", where=where)


def as_source(
    stored: Stored,
    layout: Layout,
    *,
    where: str,
    skipped: int,
    names: tuple[str, ...],
    lookup: Callable[[str], Array],
) -> Arrays:
    """`lookup` gives a column with its bad rows; they are left out here."""
    return Arrays(
        (_rows(stored.inputs, where),),
        None if stored.target is None else _rows(stored.target, where),
        skipped=skipped,
        classes=layout.classes,
        names=names,
        lookup=lambda name: np.delete(lookup(name), stored.bad),
    )


def _rows(array: Array, where: str) -> Rows:
    return Mapped(array, where) if isinstance(array, np.memmap) else Held(array)
