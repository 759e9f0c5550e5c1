"""The answers of the API as typed data. The OpenAPI document is made from these classes."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

Value = float | str | None
"""A number; NaN and infinity are the texts nan, inf and -inf."""


class Answer(BaseModel):
    model_config = ConfigDict(frozen=True, protected_namespaces=(), defer_build=True)


class RunRow(Answer):
    """One run of the list. `started_t`: seconds since 1970."""

    run: str
    job: str
    status: str
    step: int
    steps: int
    metrics: dict[str, Value]
    started_t: float | None
    weights_sha256: str
    tags: list[str]
    damage: str


class RunGroup(Answer):
    """Runs of one job: how many, and how many of them train. `kind`: `job`, or `search`: then `job` is its name, its
    runs are its trials, and `training` is 1 while it goes on."""

    kind: str
    job: str
    runs: int
    training: int
    newest_t: float | None


class RunList(Answer):
    """`total`: how many match; `cursor`: what to ask with for the next rows, or null. `groups` are the largest of
    `all_groups`."""

    rows: list[RunRow]
    groups: list[RunGroup]
    all_groups: int
    total: int
    cursor: str | None


class WorkerRow(Answer):
    """`holds_back`: 0.4 if the others need 40 % less time for their lanes than this one, the slowest; else 0. `usage`:
    its last sample (`cpu`, `rss_bytes`, `room_bytes`, `net_bytes_s`, `device_bytes`, `device_total_bytes`)."""

    name: str
    host: str
    state: str
    lanes: list[int]
    saves: bool
    step: int
    samples: int
    samples_per_s: Value
    holds_back: float
    usage: dict[str, float]


class ServerRow(Answer):
    name: str
    host: str
    state: str
    primary_bytes: int
    backup_bytes: int


class RunPage(Answer):
    """A run now. `notes`: lines of what happened, the newest last. `packed`: it was compacted. `peak_workers`: so many
    trained at the same time."""

    run: str
    name: str
    status: str
    step: int
    steps: int
    epoch: float
    loss: Value
    lr: Value
    eta_s: Value
    samples_per_s: Value
    metrics: dict[str, Value]
    best: dict[str, Value]
    times: dict[str, float]
    workers: list[WorkerRow]
    peak_workers: int
    servers: list[ServerRow]
    folds: list[str]
    notes: list[str]
    error: dict[str, str] | None
    plan: list[str]
    deaths: int
    starts: int
    views: int
    started_t: float | None
    last_event_t: float
    weights_sha256: str
    damage: str
    tags: list[str]
    packed: bool
    offset: int


class SeriesPage(Answer):
    """One series in bins: last step, time, extremes and last value of each; null where no value is finite.
    `least` and `most` are empty if every bin is one point. `not_finite`: steps of bins with NaN or infinity."""

    name: str
    points: int
    step: list[int]
    t: list[float]
    last: list[Value]
    least: list[Value]
    most: list[Value]
    not_finite: list[int]


class SeriesList(Answer):
    run: str
    step: int
    names: list[str]
    series: list[SeriesPage]


class EventsPage(Answer):
    """Rows of the stream from byte `start` to byte `end`; ask for the rows after `end` next."""

    run: str
    start: int
    end: int
    rows: list[dict[str, Any]]


class TimelinePage(Answer):
    """Seconds by worker and kind in parts of `width_s` from `start_t` on. `marks`: what happened to the run, which
    began at `started_t`; `left_out`: so many more are not kept."""

    started_t: float | None
    start_t: float | None
    width_s: float
    workers: dict[str, dict[str, list[float]]]
    marks: list[dict[str, Any]]
    left_out: int


class LogRow(Answer):
    name: str
    size_bytes: int


class LogLines(Answer):
    """Whole lines of a log from byte `start` to byte `end`."""

    name: str
    start: int
    end: int
    size_bytes: int
    lines: list[str]


class FoundLine(Answer):
    name: str
    offset: int
    line: str


class FoundLines(Answer):
    text: str
    matches: list[FoundLine]
    more: bool


class ReceiptAnswer(Answer):
    """`receipt` is null while the run has none; `damage` says why it cannot be used."""

    receipt: dict[str, Any] | None
    damage: str


class JobText(Answer):
    run: str
    yaml: str


class Comparison(Answer):
    """Fields of jobs and results, one value per run. `same_bits`: whether all runs have the same weights; null if one
    of them has none yet. For two runs whose losses differ: they part after the step `part_after`, at the latest at the
    step `part_at`. Between them no step is reported by both."""

    runs: list[str]
    fields: dict[str, list[bool | int | float | str | None]]
    differs: list[str]
    same_bits: bool | None
    part_after: int | None
    part_at: int | None


class OperationAnswer(Answer):
    """`state`: `running`, `done` or `failed`; `result` or `error` say more."""

    operation: str
    what: str
    run: str
    state: str
    result: dict[str, Any] = Field(default_factory=dict)
    error: dict[str, str] | None = None


class UsageRow(Answer):
    """`freed_bytes` and `shared_bytes` are all that it occupies; what is shared has another name elsewhere. `may_drop`:
    it has checkpoints of its own, which may go. Those of a search's trials belong to the search."""

    run: str
    size_bytes: int
    freed_bytes: int
    shared_bytes: int
    files: int
    parts: dict[str, int]
    may_drop: bool


class TrashRow(Answer):
    entry: str
    run: str
    part: str
    t: float
    size_bytes: int


class StorageAnswer(Answer):
    """`free_bytes` and `total_bytes` are those of the disk; `full_in_s`: when it will be full at the rate since the
    server started, at most of the last hour; None if it does not fill, or that is not known yet. `rows` are the largest
    runs."""

    free_bytes: int
    full_in_s: float | None
    total_bytes: int
    size_bytes: int
    freed_bytes: int
    runs: int
    rows: list[UsageRow]
    trash: list[TrashRow]


class PlannedRow(Answer):
    run: str
    part: str
    freed_bytes: int


class CleanupPlan(Answer):
    """What would move to the trash. `plan`: the hash by which exactly that is applied; '' if it is nothing."""

    plan: str
    freed_bytes: int
    items: list[PlannedRow]


class IdentityAnswer(Answer):
    name: str
    role: str
    runs: list[str] | None
    expires_t: float | None
    version: str


class HealthAnswer(Answer):
    ok: bool
