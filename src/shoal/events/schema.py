"""The schema of a run's events: one class per kind, with the kind's fields, their types and what they mean.

Units stand in the names: `_s` seconds, `_bytes` bytes, `_bytes_s` bytes per second. A field with a default may be left
out. `python -m shoal.events.schema_docs` prints the table of docs/runs.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypedDict, TypeVar

from shoal.events.checks import Count, Number, is_count, is_finite
from shoal.events.event import Event, EventKind

SCHEMA_VERSION = 2
"""The version in `run_started` rows. Rows of version 1 use the former names below."""

FORMER_KINDS = {
    "put_out": "evicted",
    "memory_lost": "residual_lost",
    "served": "server_stats",
    "table": "chunk_table",
}
FORMER_FIELDS: Mapping[str, Mapping[str, str]] = {
    "evaluated": {"part": "split"},
    "server_stats": {"served": "stats"},
}
"""Former field names and their present names, by present kind."""

MAX_TIME_S = 1e11
"""Timestamps after the year 5000 count as damage."""

LANES_MOVE = "lanes move to faster workers"
"""The reason in a `view` that asks workers to stop because the driver gives them other lanes."""

_EMPTY: Mapping[str, Any] = MappingProxyType({})
KindClass = TypeVar("KindClass", bound=type)


KINDS: dict[str, EventKind] = {}
"""All kinds by name, in the order of the table in docs/runs.md."""


def _kind(fields_class: KindClass) -> KindClass:
    found = EventKind(fields_class, in_stream=True, open_fields=False)
    KINDS[found.name] = found
    return fields_class


# ---- values that stand in several kinds ----


class ChoiceFields(TypedDict):
    """A way to run a job: `how` names sync, codec and sharding."""

    workers: Count
    hosts: Count
    threads: Count
    how: str


class CandidateFields(ChoiceFields):
    """A way that was not chosen. `needs`: words that `plan.allow` lacks."""

    step_s: Number | None
    needs: list[str]
    reason: str


class PredictionFields(TypedDict):
    """The predicted time of a step, and its parts."""

    step_s: float
    compute_s: float
    encode_s: float
    exchange_s: float
    apply_s: float


class MeasuredFields(TypedDict):
    """The measured time of a step; `lane_s`: each worker's lane time, by host."""

    step_s: float
    lane_s: list[list[float]]


class HeldBytesFields(TypedDict, total=False):
    """Bytes that a server holds; `filling_bytes` are still being copied to it."""

    primary_bytes: Count
    backup_bytes: Count
    filling_bytes: Count


# ---- kinds ----


@_kind
class RunStartedEvent(NamedTuple):
    """The driver starts or resumes the run."""

    run: str
    pid: Count = 0
    listens: Annotated[str, "the address that workers connect to"] = ""
    tls: bool = False
    schema: Annotated[Count, "the version of the rows that follow"] = 1


@_kind
class SeatsGivenEvent(NamedTuple):
    """The driver gives seats to processes that it starts, or that join. No later driver gives these seats out again,
    even if their processes never report anything."""

    seats: Annotated[Sequence[str], "their names, such as worker-3"]


@_kind
class PlanEvent(NamedTuple):
    """With [`sync: auto`](planning.md#sync-auto): the planner has chosen how to run the job."""

    choice: ChoiceFields
    prediction: Annotated[PredictionFields, "what a step should take, and where that goes"]
    reason: str
    offer: Annotated[CandidateFields | None, "what would be faster and is not allowed"] = None
    others: Annotated[Sequence[CandidateFields], "the best of other kinds, and why not those"] = ()
    notes: Sequence[str] = ()


@_kind
class ReplanEvent(NamedTuple):
    """[Steps have moved away](planning.md#prediction-and-truth) from what was expected, and the planner looks again."""

    choice: Annotated[ChoiceFields, "how the run is carried now"]
    prediction: Annotated[PredictionFields, "what a step should have taken"]
    truth: Annotated[MeasuredFields, "what it took; `lane_s`: each worker's lane, by host"]
    expected: Annotated[PredictionFields, "what a step should take from now on"]
    moves: Annotated[ChoiceFields | None, "the workers that are taken instead (null: none)"]
    best: Annotated[CandidateFields | None, "what a new run would take"]
    reason: str


@_kind
class WorkerStartedEvent(NamedTuple):
    """A worker's process has started."""

    pid: Count = 0
    host: str = ""
    threads: Count | None = None
    torch: str = ""


@_kind
class BuiltEvent(NamedTuple):
    """A worker has opened the data and built the model."""

    steps: Count
    steps_per_epoch: Count
    lanes: Count
    samples: Annotated[Mapping[str, Count], "by split"]
    skipped: Annotated[Count, "bad rows that were left out"]
    device: str
    parameters: Count | None = None
    trainable: Count | None = None


@_kind
class ResumedEvent(NamedTuple):
    """A worker has loaded a checkpoint, or a state of shards that is older than the newest."""

    source: str = "a checkpoint"
    recovery_s: float = 0.0
    redone: Annotated[Count, "steps that were committed before and are computed again"] = 0


@_kind
class LayoutEvent(NamedTuple):
    """Workers hold a [model together](shards.md), and this is how."""

    shard: str
    ways: Annotated[Count, "workers of one replica"]
    replicas: Count
    cuts: Annotated[Sequence[str], "where a pipeline is cut"]
    parameters: Count
    trainable: Count
    why: Annotated[str, "why the result differs from that of one process, if it does"] = ""


@_kind
class ViewEvent(NamedTuple):
    """The driver publishes a new view; without `carries` it asks the workers to stop, and `why`."""

    number: Count
    why: str = ""
    carries: Annotated[Mapping[str, list[Count]], "by worker: its lanes"] = _EMPTY
    saver: Annotated[str, "the worker that saves for all"] = ""
    source: Annotated[str | None, "the worker whose memory has the state (null: all have it)"] = None


@_kind
class CaughtUpEvent(NamedTuple):
    """A worker has got the state from another worker's memory."""

    source: str
    followed: Annotated[bool, "it caught up while the others trained"] = False
    recovery_s: float = 0.0


@_kind
class LinkMeasuredEvent(NamedTuple):
    """A new worker on another host has measured the link to the worker that it gets the state from."""

    latency_s: float
    send_bytes_s: float
    receive_bytes_s: float
    peer: str = ""


@_kind
class JoinedEvent(NamedTuple):
    """A worker has entered a view with its lanes, and trains."""

    lanes: Sequence[Count]
    view: Count = 0
    saves: Annotated[bool, "it is the worker that saves for all"] = True


@_kind
class StoppedEvent(NamedTuple):
    """A worker's step was discarded, or a peer is gone; the worker waits for the next view."""

    view: Count = 0
    why: str = ""


@_kind
class StepEvent(NamedTuple):
    """A worker has made a step, or several that took less than 50 ms together."""

    steps: Annotated[Count, "how many steps the row counts"] = 1
    loss: Number | None = None
    lr: Number | None = None
    samples: Annotated[Count, "of this worker's lanes"] = 0
    wall_s: float = 0.0
    bytes_sent: Count = 0
    bytes_plain: Annotated[Count | None, "what `bytes_sent` would be without a codec"] = None
    inner: Annotated[bool, "[by this worker alone](local.md), not yet agreed on"] = False
    data_s: float = 0.0
    compute_s: float = 0.0
    exchange_s: float = 0.0
    waiting_s: float = 0.0
    saving_s: float = 0.0
    evaluation_s: float = 0.0
    recovery_s: float = 0.0


@_kind
class SelfCheckedEvent(NamedTuple):
    """The workers have [computed lanes again](training.md#self-check) with new objects and compared the bits."""

    lanes: Annotated[Count, "how many were compared"]
    why: Annotated[str, "what differs, if anything does"] = ""
    objects: Annotated[Sequence[str], "what no checkpoint holds and differs"] = ()
    failure: Annotated[str, "why nothing could be compared"] = ""
    checking_s: float = 0.0


@_kind
class EvaluatedEvent(NamedTuple):
    """The workers have measured a split: validation or test."""

    split: str
    metrics: Mapping[str, Number]
    evaluation_s: float = 0.0
    again: Annotated[bool, "a new saver repeats it, in case the last one died before it could write it"] = False


@_kind
class BestEvent(NamedTuple):
    """The monitored metric is better than ever."""

    metric: str
    value: Number
    again: Annotated[bool, "as in `evaluated`"] = False


@_kind
class SavedEvent(NamedTuple):
    """A checkpoint is safe."""

    size_bytes: Count = 0
    written_bytes: Annotated[Count, "what earlier checkpoints did not hold already"] = 0
    stall_s: Annotated[float, "how long training stood still for it"] = 0.0
    write_s: float = 0.0
    recovered: Annotated[bool, "the save before it failed"] = False


@_kind
class SaveFailedEvent(NamedTuple):
    """A checkpoint could not be written; training goes on."""

    reason: str


@_kind
class SaveSkippedEvent(NamedTuple):
    """It was time to save, but the last checkpoint was still being written."""


@_kind
class CheckpointInvalidEvent(NamedTuple):
    """A worker has passed over a damaged checkpoint."""

    reason: str


@_kind
class CleanupFailedEvent(NamedTuple):
    """Old checkpoints could not be removed."""

    reason: str


@_kind
class ExportSkippedEvent(NamedTuple):
    """A file of the model could not be exported."""

    what: str
    reason: str


@_kind
class LoaderRestartedEvent(NamedTuple):
    """A worker's loader process died; another one builds its batch again."""

    reason: str
    samples: Annotated[Sequence[Count], "the first samples of the batch"] = ()


@_kind
class NoteEvent(NamedTuple):
    """Anything worth a line: leaks, files that are being copied."""

    message: str


@_kind
class UsageEvent(NamedTuple):
    """What a worker uses, from its heartbeat: every 2 seconds."""

    worker: str
    cpu: Annotated[float, "cores that it kept busy"]
    rss_bytes: Annotated[Count, "memory that it has"]
    room_bytes: Annotated[Count, "memory that it may still take, by its limits and its machine"]
    net_bytes_s: Annotated[Count, "what it exchanged with others"] = 0
    device_bytes: Annotated[Count | None, "memory of its GPU that is used"] = None
    device_total_bytes: Count | None = None


@_kind
class AlertEvent(NamedTuple):
    """A rule of [`alerts`](job-file.md#alerts) speaks."""

    when: str
    text: str
    about: Annotated[str, "the worker or metric"] = ""


@_kind
class WeightsLoadedEvent(NamedTuple):
    """The weights of `init_from` were loaded; every worker reports it. A list has at most 2,000 names, a count all."""

    path: str
    loaded: Annotated[Count, "tensors that fit"]
    tensors: Annotated[Count, "tensors of the model; tied parameters are one"]
    missing: Annotated[Sequence[str], "tensors that the file lacks"] = ()
    missing_count: Count = 0
    left_over: Annotated[Sequence[str], "tensors that the model lacks"] = ()
    left_over_count: Count = 0
    mismatched: Annotated[Sequence[str], "tensors of another shape"] = ()
    mismatched_count: Count = 0


@_kind
class EvictedEvent(NamedTuple):
    """The driver evicts a worker or server that is frozen or hangs, or whose state is lost, and replaces it."""

    reason: str
    worker: str = ""
    server: str = ""
    host: str = ""


@_kind
class RefusedEvent(NamedTuple):
    """The driver refuses a process that knows the token: it said what it may not say. Few such rows are written when
    there are many; `run_ended` counts all."""

    reason: str
    name: Annotated[str, "what the process was"] = ""
    address: Annotated[str, "where it connected from"] = ""


@_kind
class WorkerDiedEvent(NamedTuple):
    """A worker's process ended without saying why."""

    worker: str
    reason: str


@_kind
class ServersWantedEvent(NamedTuple):
    """The number of servers that the run wants, at the start and when it changes."""

    number: Count
    why: str = ""


@_kind
class ServerStartedEvent(NamedTuple):
    """A server has connected, or was taken over from an earlier driver."""

    server: str
    pid: Count = 0
    host: str = ""


@_kind
class ChunkTableEvent(NamedTuple):
    """The driver publishes a new table of which server holds which chunks."""

    number: Count
    servers: Annotated[Mapping[str, HeldBytesFields], "by server: `primary_bytes`, `backup_bytes`, `filling_bytes`"]
    chunks: Count = 0
    pieces: Count = 0
    copies: Annotated[Count, "of every chunk, at least"] = 0
    moved_bytes: Annotated[Count, "what has to be moved for it"] = 0
    failovers: Annotated[Count, "servers that died as primary of some chunk"] = 0
    why: str = ""


@_kind
class ServerStatsEvent(NamedTuple):
    """Every few seconds: what a server has done so far."""

    server: str
    stats: Annotated[
        Mapping[str, float],
        "`pushes`, `bytes_in`, `bytes_out`, `staleness_mean`, `staleness_max`, with a codec `bytes_plain`, and others",
    ]


@_kind
class ServerDiedEvent(NamedTuple):
    """A server's process ended; another server takes its place."""

    server: str
    reason: str


@_kind
class ServerLeftEvent(NamedTuple):
    """A server left as the driver asked, after others had its chunks."""

    server: str


@_kind
class ServersLostEvent(NamedTuple):
    """No server holds some of the parameters any more: the workers start again from the newest checkpoint."""

    reason: str


@_kind
class ResidualLostEvent(NamedTuple):
    """A codec's residual of a lane died with a worker; the lane begins with an empty one, and the run is not exact."""

    lane: Count
    worker: str = ""


@_kind
class LeftEvent(NamedTuple):
    """A worker left as the driver asked; the worker that saves does so first."""

    why: str = ""


@_kind
class FinishedEvent(NamedTuple):
    """The last step is committed, and checkpoint and model are written."""

    weights_sha256: str
    state_sha256: str
    samples_seen: Count
    metrics: Mapping[str, Number]
    stopped: Annotated[str, "why before the last step, if it was"]
    platform: Mapping[str, str]
    export_s: Annotated[float, "the time in which the model was exported"] = 0.0


@_kind
class VerifiedEvent(NamedTuple):
    """The driver has read the exported model, and its weights are those that `finished` reports."""

    weights_sha256: Annotated[str, "of the tensors in model.safetensors, computed from the file"]
    size_bytes: Count
    verify_s: float = 0.0


@_kind
class FailedEvent(NamedTuple):
    """An [error](errors.md) ended a process."""

    code: str
    message: str
    where: str = ""
    fix: str = ""


@_kind
class RunEndedEvent(NamedTuple):
    """The driver is done."""

    status: Annotated[str, "`finished`, `failed`, `interrupted`, `terminated` or `stopped`"]
    refused: Annotated[
        Count, "connections that driver and workers refused: strangers, noise, calls for an older view"
    ] = 0


# ---- kinds that do not occur in a run's stream ----


class PrintedEvent(NamedTuple):
    """A worker or server printed a line."""

    text: str


class AnswerEvent(NamedTuple):
    """The answer of a probe; its fields depend on the question."""


class StepsLostEvent(NamedTuple):
    """Workers start again without a checkpoint: a note of `RunState`."""

    steps: Count


for _fields_class, _open in ((PrintedEvent, False), (AnswerEvent, True), (StepsLostEvent, False)):
    _found = EventKind(_fields_class, in_stream=False, open_fields=_open)
    KINDS[_found.name] = _found


# ---- rows ----


def to_row(event: Event) -> dict[str, Any]:
    t = round(event.t, 6)
    if event.step is None:
        return {"t": t, "who": event.who, "kind": event.kind, **event.fields}
    return {"t": t, "who": event.who, "kind": event.kind, "step": event.step, **event.fields}


def from_row(row: Any) -> Event | None:
    """The event of a row of this version or an earlier one; None if the row breaks the schema. Modifies the row."""
    try:
        kind, t, who, step = row.pop("kind"), row.pop("t"), row.pop("who"), row.pop("step", None)
        found = KINDS.get(kind)
        if found is None:
            kind = FORMER_KINDS[kind]
            found = KINDS[kind]
    except (KeyError, AttributeError, TypeError):
        return None
    if kind in FORMER_FIELDS:
        for former, today in FORMER_FIELDS[kind].items():
            if former in row and today not in row:
                row[today] = row.pop(former)
    if not (
        (type(t) is float or is_finite(t))
        and 0 <= t < MAX_TIME_S
        and type(who) is str
        and (step is None or is_count(step))
    ):
        return None
    return Event(kind, t, who, step, row) if found.accepts(row) else None
