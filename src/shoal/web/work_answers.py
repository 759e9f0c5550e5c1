"""The answers about searches, the queue, compressions and profiles as typed data."""

from __future__ import annotations

from typing import Any

from shoal.web.answers import Answer, Value


class SearchRow(Answer):
    """One search of the list. `told` of `decided`: stretches of training with a result."""

    run: str
    status: str
    told: int
    decided: int
    metrics: dict[str, Value]
    started_t: float | None


class SearchList(Answer):
    rows: list[SearchRow]


class SearchGoal(Answer):
    """A metric that the search improves. `sign`: 1 if larger is better, -1 if smaller is."""

    metric: str
    sign: int


class TrialRow(Answer):
    """`unit` of `units` is trained. `rank`: 1 for the best; null without a value. `on_front`: no other trial is better
    in every metric. `run`: the name of its run, '' if it has none."""

    trial: int
    state: str
    rank: int | None
    on_front: bool
    unit: int
    units: int
    values: dict[str, Value]
    changes: dict[str, Any]
    failure: str
    why: str
    copy_of: list[int] | None
    run: str


class BestRow(Answer):
    """A new best value of the first metric, after so many trainings."""

    trainings: float
    trial: int
    value: Value


class SearchPage(Answer):
    """A search now: `trials` are the best, then those without a value. `importance`: the share of each key, empty while
    there are too few trials. `spent`: trainings, in parts of whole ones. `note`: why history, front and importance are
    missing, or ''."""

    run: str
    status: str
    goals: list[SearchGoal]
    best: int | None
    spent: float
    decisions: int
    starts: int
    total: int
    counts: dict[str, int]
    trials: list[TrialRow]
    history: list[BestRow]
    importance: dict[str, float]
    front: list[int]
    receipt: dict[str, Any] | None
    note: str


class QueueRow(Answer):
    """A job of the queue. `why`: why it is where it is. `least` and `most` are its bounds on workers."""

    id: int
    name: str
    user: str
    priority: int
    state: str
    why: str
    run: str
    workers: int
    least: int
    most: int
    after: list[int]
    attempts: int
    submitted_t: float
    started_t: float
    ended_t: float


class QueueAnswer(Answer):
    """The queue now. `served`: whether a daemon lives. `total`: all jobs, also those that are not in `rows`. `quotas`:
    cores by user."""

    served: bool
    total: int
    counts: dict[str, int]
    quotas: dict[str, int]
    rows: list[QueueRow]


class QueueChange(Answer):
    t: float
    state: str
    workers: int
    reason: str


class QueueEntryPage(Answer):
    """One job, and what happened to it, the oldest first."""

    entry: QueueRow
    history: list[QueueChange]


class CompressionRow(Answer):
    """One compression of the list. `size_ratio`: the chosen file's size, as a part of the parent's."""

    run: str
    status: str
    parent: str
    chosen: str
    targets_met: bool | None
    size_ratio: float | None
    started_t: float | None


class CompressionList(Answer):
    rows: list[CompressionRow]


class RungRow(Answer):
    """One attempt. `drop`: how much worse than the parent, at most `drop_bound` (95 %). `latency`: the ratio to the
    parent in the same runtime by batch size, as median and quartiles."""

    name: str
    kept: bool
    chosen: bool
    why: str
    steps: list[str]
    parameters: int
    size_bytes: int | None
    size_ratio: float | None
    metric: str
    value: Value
    drop: Value
    drop_bound: Value
    latency: dict[str, list[float]]


class LadderPage(Answer):
    """The ladder of a compression. `parent` is '' if the run is not the result of one, or has no report yet."""

    run: str
    parent: str
    parent_sha256: str
    chosen: str
    targets_met: bool
    rungs: list[RungRow]
    test: dict[str, Any] | None
    notes: list[str]


class OperatorAnswer(Answer):
    """`self_us`: without the operators that it called."""

    name: str
    calls: int
    total_us: float
    self_us: float


class ProfileRow(Answer):
    """A profile of some steps, with the operators that took longest. `missing`: workers that wrote none, and why."""

    name: str
    t: float
    first_step: int
    steps: int
    workers: list[str]
    missing: dict[str, str]
    size_bytes: int
    operators: list[OperatorAnswer]
