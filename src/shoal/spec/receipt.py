"""The receipt: the result of a finished run."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field, ValidationError

from shoal.spec.base import Spec

MAX_RECEIPT_BYTES = 1 << 26
_MAX_WHOLE = int(sys.float_info.max)

Whole = Annotated[int, Field(ge=-_MAX_WHOLE, le=_MAX_WHOLE)]
"""A whole number that can be printed: larger ones have no float."""


class WorkerContribution(Spec):
    """The work of one worker; `lanes` are the lanes that it ran last."""

    model_config = ConfigDict(allow_inf_nan=True, extra="ignore")

    host: str = ""
    lanes: list[Whole] = Field(default_factory=list)
    steps: Whole = 0
    samples: Whole = 0
    work_s: float = 0.0


class InitialWeights(Spec):
    """What the run took from `init_from`; see the event `weights_loaded`."""

    path: str
    loaded: int
    tensors: int
    missing: list[str] = Field(default_factory=list)
    missing_count: int = 0
    left_over: list[str] = Field(default_factory=list)
    left_over_count: int = 0
    mismatched: list[str] = Field(default_factory=list)
    mismatched_count: int = 0

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> InitialWeights:
        """From the fields of an event, which may have further ones."""
        return cls.model_validate({name: value for name, value in fields.items() if name in cls.model_fields})

    def __str__(self) -> str:
        return f"{self.path}: {self.loaded} of {self.tensors} tensors"

    def left_out(self, *, shown: int) -> list[str]:
        """A sentence for each kind of tensor that was not loaded, with at most this many names."""
        kinds = {
            "not in the file": (self.missing, self.missing_count),
            "not in the model": (self.left_over, self.left_over_count),
            "of another shape": (self.mismatched, self.mismatched_count),
        }
        return [
            f"{count} {what}: {', '.join(names[:shown])}{f' and {count - shown} more' if count > shown else ''}"
            for what, (names, count) in kinds.items()
            if count
        ]


class Receipt(Spec):
    """Result of a run. `exact` is None if the job promises the same bits on any number of workers and nothing was
    checked; `lanes_checked` counts the lanes that workers computed again.

    `total_s` is wall time from first start to end, `training_after_s` the part of it before a worker trained.
    `worker_s` is the time of all workers together, each from its start to its last report; the times of WORKER_TIMES
    and `other_s` are its parts. `samples_per_s` is per second of wall time in which the run made steps.

    `workers` is the maximum that worked at the same time; `carried` has the work of each worker. `servers` is
    the maximum that held parameters at the same time; staleness counts the steps by which pushes were late.
    `bytes_plain` is what would have been sent without a codec. `redone` counts steps that were repeated because their
    result was lost with workers.

    A metric may be NaN: measured values are reported unchanged. Fields that a newer version has added are ignored.
    """

    model_config = ConfigDict(allow_inf_nan=True, extra="ignore")

    run: str
    job_sha256: str
    exact: bool | None
    why: str = ""
    lanes_checked: int = 0
    weights_sha256: str
    state_sha256: str
    steps: Whole
    epochs: float
    samples_seen: Whole
    parameters: Whole
    init_from: InitialWeights | None = None
    workers: Whole
    lanes: Whole
    starts: Whole = 1
    deaths_survived: Whole = 0
    redone: Whole = 0
    servers: Whole = 0
    server_deaths_survived: Whole = 0
    staleness_mean: float = 0.0
    staleness_max: Whole = 0
    views: Whole = 0
    carried: dict[str, WorkerContribution] = Field(default_factory=dict)
    stopped: str = ""
    startup_s: float = 0.0
    compute_s: float = 0.0
    data_s: float = 0.0
    exchange_s: float = 0.0
    waiting_s: float = 0.0
    saving_s: float = 0.0
    evaluation_s: float = 0.0
    recovery_s: float = 0.0
    checking_s: float = 0.0
    export_s: float = 0.0
    other_s: float = 0.0
    worker_s: float = 0.0
    total_s: float = 0.0
    training_after_s: float = 0.0
    samples_per_s: float = 0.0
    bytes_sent: Whole = 0
    bytes_plain: Whole = 0
    bytes_saved: Whole = 0
    metrics: dict[str, float] = Field(default_factory=dict)
    best: dict[str, float] = Field(default_factory=dict)
    platform: dict[str, str] = Field(default_factory=dict)


class FoldMetric(Spec):
    """A metric over the folds of a job."""

    model_config = ConfigDict(allow_inf_nan=True)

    mean: float
    std: float


class FoldsReceipt(Spec):
    """The receipt of a job with folds: those of its folds, and the metrics over them."""

    model_config = ConfigDict(extra="ignore")

    run: str
    folds: list[Receipt]
    metrics: dict[str, FoldMetric]


class ReceiptFile(NamedTuple):
    """What a file holds: a receipt, nothing because there is no file, or `damage`, the reason why it is not a
    receipt."""

    found: Receipt | FoldsReceipt | None = None
    damage: str = ""

    @property
    def own(self) -> Receipt | None:
        """The receipt of a run without folds."""
        return self.found if isinstance(self.found, Receipt) else None


def read_receipt_file(path: Path) -> ReceiptFile:
    """Read a receipt and check every field. Never raises: a damaged receipt must not hide the run."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_RECEIPT_BYTES + 1)
    except FileNotFoundError:
        return ReceiptFile()
    except OSError as failure:
        return ReceiptFile(damage=failure.strerror or str(failure))
    if len(raw) > MAX_RECEIPT_BYTES:
        return ReceiptFile(damage=f"it is larger than {MAX_RECEIPT_BYTES} bytes")
    try:
        content = json.loads(raw)
        kind = FoldsReceipt if isinstance(content, dict) and "folds" in content else Receipt
        return ReceiptFile(kind.model_validate(content))
    except ValidationError as failure:
        first = failure.errors()[0]
        return ReceiptFile(damage=f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}")
    except (ValueError, RecursionError):
        return ReceiptFile(damage="it is not JSON")


def describe_lost_residual(lane: int, worker: str, step: int | None) -> str:
    """Why a run with a codec is not exact: the residual died with a worker ('' if the worker is unknown)."""
    return f"the residual of lane {lane} was lost{f' with {worker}' if worker else ''} at step {step}"


def metrics_mean_and_std(receipts: Sequence[Receipt]) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of each metric over the folds of a job."""
    found: dict[str, list[float]] = {}
    for receipt in receipts:
        for name, value in receipt.metrics.items():
            found.setdefault(name, []).append(value)
    return {name: (mean_of(v), _standard_deviation(v)) for name, v in found.items()}


def _standard_deviation(values: Sequence[float]) -> float:
    if not all(map(math.isfinite, values)):
        return math.nan  # statistics would raise
    try:
        return statistics.stdev(values) if len(values) > 1 else 0.0
    except OverflowError:  # it is larger than any float
        return math.inf


def mean_of(values: Sequence[float]) -> float:
    """The mean of any numbers: those of a model that diverged may be infinite, or too large to be added."""
    if not all(map(math.isfinite, values)):
        return sum(values)  # inf or nan, as is the mean
    try:
        return statistics.fmean(values)
    except OverflowError:
        return math.fsum(value / len(values) for value in values)
