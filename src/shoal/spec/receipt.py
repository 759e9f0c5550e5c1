"""The receipt: the result of a finished run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from pydantic import ConfigDict, Field

from shoal.spec.base import Spec


class WorkerContribution(Spec):
    """The work of one worker; `lanes` are the lanes that it ran last."""

    host: str = ""
    lanes: list[int] = Field(default_factory=list)
    steps: int = 0
    samples: int = 0
    work_s: float = 0.0


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

    A metric may be NaN: measured values are reported unchanged.
    """

    model_config = ConfigDict(allow_inf_nan=True)

    run: str
    job_sha256: str
    exact: bool | None
    why: str = ""
    lanes_checked: int = 0
    weights_sha256: str
    state_sha256: str
    steps: int
    epochs: float
    samples_seen: int
    parameters: int
    workers: int
    lanes: int
    starts: int = 1
    deaths_survived: int = 0
    redone: int = 0
    servers: int = 0
    server_deaths_survived: int = 0
    staleness_mean: float = 0.0
    staleness_max: int = 0
    views: int = 0
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
    other_s: float = 0.0
    worker_s: float = 0.0
    total_s: float = 0.0
    training_after_s: float = 0.0
    samples_per_s: float = 0.0
    bytes_sent: int = 0
    bytes_plain: int = 0
    bytes_saved: int = 0
    metrics: dict[str, float] = Field(default_factory=dict)
    best: dict[str, float] = Field(default_factory=dict)
    platform: dict[str, str] = Field(default_factory=dict)


def describe_lost_residual(lane: int, worker: str, step: int | None) -> str:
    """Why a run with a codec is not exact: the residual died with a worker ('' if the worker is unknown)."""
    return f"the residual of lane {lane} was lost{f' with {worker}' if worker else ''} at step {step}"


def metrics_mean_and_std(receipts: Sequence[Receipt]) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of each metric over the folds of a job."""
    found: dict[str, list[float]] = {}
    for receipt in receipts:
        for name, value in receipt.metrics.items():
            found.setdefault(name, []).append(value)
    return {name: (statistics.fmean(v), _standard_deviation(v)) for name, v in found.items()}


def _standard_deviation(values: Sequence[float]) -> float:
    if not all(map(math.isfinite, values)):
        return math.nan  # statistics would raise
    return statistics.stdev(values) if len(values) > 1 else 0.0
