"""The journal of a search: one append-only file of typed rows, from which a new driver continues.

A killed driver may leave an incomplete last row: it is cut off, and what it said is decided or read again.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, NonNegativeInt, TypeAdapter, ValidationError

from shoal.errors import error, from_os_error
from shoal.plan.search.trial import Stretch, StretchResult, TrialShape
from shoal.spec.base import Spec

FORMAT = 2
"""1: shapes had no `memory`."""
MAX_ROW_BYTES = 1 << 24


class JournalRow(Spec):
    """Numbers that are not finite are written as text."""

    model_config = ConfigDict(allow_inf_nan=True, ser_json_inf_nan="strings")


class StartedRow(JournalRow):
    """A driver began or resumed the search. `t`: seconds since the epoch. Only the first row must have `job_sha256`."""

    kind: Literal["started"] = "started"
    format: NonNegativeInt = FORMAT
    job_sha256: str = ""
    workers: NonNegativeInt = 1
    t: float = 0.0


class ShapeRow(JournalRow):
    """The shape of a trial. `boundaries`: the step at the end of each unit; none in a job with folds. `machine`: the
    failure depends on the machine. `memory`: what the sampler goes on with (see `Point`)."""

    kind: Literal["shape"] = "shape"
    trial: NonNegativeInt
    changes: dict[str, Any]
    units: NonNegativeInt
    cost: float
    facts: dict[str, float] = Field(default_factory=dict)
    boundaries: list[NonNegativeInt] = Field(default_factory=list)
    failure: str = ""
    machine: bool = False
    memory: list[float] = Field(default_factory=list)

    @property
    def shape(self) -> TrialShape:
        return TrialShape(self.units, self.cost, self.facts, self.failure)


class DecidedRow(JournalRow):
    """A decision; see `Stretch`."""

    kind: Literal["decided"] = "decided"
    number: NonNegativeInt
    slot: NonNegativeInt
    trial: NonNegativeInt
    changes: dict[str, Any]
    start: NonNegativeInt
    end: NonNegativeInt
    begins: float
    ends: float
    copy_of: tuple[NonNegativeInt, NonNegativeInt] | None = None
    why: str = ""

    @classmethod
    def of(cls, stretch: Stretch) -> DecidedRow:
        fields = {name: getattr(stretch, name) for name in cls.model_fields if name != "kind"}
        return cls(**{**fields, "changes": dict(stretch.changes)})

    @property
    def stretch(self) -> Stretch:
        return Stretch(**{name: value for name, value in self if name != "kind"})


class ToldRow(JournalRow):
    """The result of a decision. `machine`: the failure depends on the machine. `seconds` is wall time, `t` the time.
    `mean` and `error` (its standard error) are over all folds or seeds of the trial so far."""

    kind: Literal["told"] = "told"
    number: NonNegativeInt
    rows: list[dict[str, float]] = Field(default_factory=list)
    mean: dict[str, float] = Field(default_factory=dict)
    error: dict[str, float] = Field(default_factory=dict)
    failure: str = ""
    machine: bool = False
    seconds: float = 0.0
    t: float = 0.0

    @property
    def result(self) -> StretchResult:
        return StretchResult(tuple(self.rows), self.failure)


class ClosedRow(JournalRow):
    """Nothing more is begun, for example because the hours of the budget are over."""

    kind: Literal["closed"] = "closed"
    why: str


class DifferenceRow(JournalRow):
    """A driver that resumed the search would have proposed other values. The journal counts."""

    kind: Literal["difference"] = "difference"
    trial: NonNegativeInt
    proposed: dict[str, Any]


class ForgottenRow(JournalRow):
    """The checkpoints of a trial were deleted to stay within `keep`."""

    kind: Literal["forgotten"] = "forgotten"
    trial: NonNegativeInt


class EndedRow(JournalRow):
    """The search has ended. `weights_sha256` is that of the winner."""

    kind: Literal["ended"] = "ended"
    best: NonNegativeInt | None
    why: str
    weights_sha256: str = ""


Row = Annotated[
    StartedRow | ShapeRow | DecidedRow | ToldRow | ClosedRow | DifferenceRow | ForgottenRow | EndedRow,
    Field(discriminator="kind"),
]
AnyRow = StartedRow | ShapeRow | DecidedRow | ToldRow | ClosedRow | DifferenceRow | ForgottenRow | EndedRow
_ROWS: TypeAdapter[AnyRow] = TypeAdapter(Row)
R = TypeVar("R", bound=JournalRow)


class Journal:
    """The rows of a search, in the order in which they were written. Belongs to the driver that holds the lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows, size_bytes = read_rows(path)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._fd, size_bytes)

    def append(self, row: AnyRow) -> None:
        """Write the row with one call: another process never sees half of it, unless the machine crashes. SH510 if the
        disk is full; then the file is as it was."""
        data = row.model_dump_json().encode() + b"\n"
        try:
            written = os.write(self._fd, data)
            if written < len(data):
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as failure:
            known = from_os_error(failure, where=str(self.path))
            if known is None:
                raise
            raise known from failure
        self.rows.append(row)

    def close(self) -> None:
        os.close(self._fd)


def rows_of(rows: Sequence[AnyRow], kind: type[R]) -> list[R]:
    return [row for row in rows if isinstance(row, kind)]


def read_rows(path: Path) -> tuple[list[AnyRow], int]:
    """The rows of a journal, and the bytes that they take. A damaged tail is left out. SH631 if a damaged row is
    followed by a sound one."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    rows: list[AnyRow] = []
    size_bytes = 0
    lines = data.split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        row = parse_row(line)
        if row is None:
            if any(parse_row(later) is not None for later in lines[number:-1]):
                raise error("SH631", f"row {number} cannot be read", where=str(path))
            break
        rows.append(row)
        size_bytes += len(line) + 1
    _check_format(rows, path)
    return rows, size_bytes


def parse_row(line: bytes) -> AnyRow | None:
    """The row in a line; None if it is damaged."""
    if len(line) > MAX_ROW_BYTES:
        return None
    try:
        return _ROWS.validate_python(json.loads(line))
    except (ValueError, ValidationError, RecursionError):
        return None


def _check_format(rows: Sequence[AnyRow], path: Path) -> None:
    first = rows[0] if rows else None
    if isinstance(first, StartedRow) and first.format > FORMAT:
        message = f"format {first.format}; this version reads formats up to {FORMAT}"
        raise error("SH631", message, where=str(path), fix="Update Shoal.")
