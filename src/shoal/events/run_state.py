"""The state of a run, folded from its events: data only. Display, receipt, `show` and `compare` use it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from shoal.errors import plural
from shoal.events import schema
from shoal.events.checks import Number, make_check
from shoal.events.event import Event, kind_name
from shoal.events.state_parts import Curve, LostResidual, Pace, RunFacts, ServerSummary, WorkerSummary

FOLD_VERSION = 7
"""Increased when the same events give a different state than before. Snapshots of an earlier version are ignored."""
MAX_NOTES = 256
TIME_FIELDS = ("data_s", "compute_s", "exchange_s", "waiting_s", "saving_s", "evaluation_s", "recovery_s")
"""The times in the rows of steps."""
WORKER_TIMES = ("startup_s", *TIME_FIELDS, "checking_s", "export_s")
"""What workers spend their time on. No second counts twice."""


@dataclass
class RunState:
    """The state of a run after the events that were applied."""

    status: str = "created"
    stage: str = ""
    """What happens before the first step of a start: importing, opening data, first batch; '' after it."""
    run: str = ""
    steps_total: int = 0
    steps_per_epoch: int = 0
    step: int = 0
    loss: Number | None = None
    lr: Number | None = None
    samples_per_s: float = 0.0
    samples_computed: int = 0
    metrics: dict[str, Number] = field(default_factory=dict)
    best: dict[str, Number] = field(default_factory=dict)
    evaluated_at: dict[str, int] = field(default_factory=dict)
    workers: dict[str, WorkerSummary] = field(default_factory=dict)
    servers: dict[str, ServerSummary] = field(default_factory=dict)
    chunk_table_number: int = 0
    wanted_servers: int = 0
    peak_servers: int = 0
    server_deaths: int = 0
    failovers: int = 0
    curves: dict[str, Curve] = field(default_factory=dict)
    notes: list[Event] = field(default_factory=list)
    """The newest events that are shown as lines to users; see `terminal.notes`."""
    times: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WORKER_TIMES, 0.0))
    """Seconds, summed over all workers."""
    training_wall_s: float = 0.0
    """Wall time of the steps, as the worker that saves has measured it."""
    joined_t: float | None = None
    """When the first worker of the run began to train."""
    starts: int = 0
    deaths: int = 0
    redone: int = 0
    last_note_is_repeat: bool = False
    """Whether the newest `note`, `weights_loaded` or `view` event says what an earlier one said: it is shown once."""
    nobody_left: bool = False
    """Whether no worker that has trained is left: unsaved steps are lost."""
    layout: dict[str, Any] = field(default_factory=dict)
    """The fields of the newest `layout` event."""
    weights_loaded: dict[str, Any] = field(default_factory=dict)
    """The fields of the first `weights_loaded` event."""
    inexact: str = ""
    """Why the layout gives a different result than one process, as reported by the workers."""
    lanes_checked: int = 0
    """Lanes that workers computed again, with the same bits or not."""
    check_difference: str = ""
    """What the first check found that differed."""
    check_failure: str = ""
    """Why the last check could compare nothing."""
    seats_given: int = 0
    """Seats below this number have been given to processes."""
    views: int = 0
    view_number: int = 0
    """The highest number of a view in an event."""
    peak_workers: int = 0
    saves: int = 0
    saved_step: int | None = None
    bytes_saved: int = 0
    bytes_sent: int = 0
    bytes_plain: int = 0
    lost_residuals: list[LostResidual] = field(default_factory=list)
    started_t: float | None = None
    last_event_t: float = 0.0
    error: dict[str, str] | None = None
    result: dict[str, Any] = field(default_factory=dict)
    verified_sha256: str = ""
    """The SHA-256 of the exported weights, as the driver computed it from the file."""
    built_by: str = ""
    facts: Annotated[dict[str, Any], make_check(RunFacts)] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    replans: list[dict[str, Any]] = field(default_factory=list)
    links: dict[str, dict[str, float]] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    skipped_rows: int = 0
    """Rows of the stream that could not be read, counted by the reader of the stream."""

    @property
    def epoch(self) -> float:
        return self.step / self.steps_per_epoch if self.steps_per_epoch else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end at the pace of the run so far."""
        return self.pace.seconds_for(self.steps_total - self.step) if self.steps_total else None

    def apply(self, event: Event) -> None:
        self.last_event_t = event.t
        if self.started_t is None:
            self.started_t = event.t
        handler = _HANDLERS.get(event.kind)
        if handler:
            handler(self, event, schema.KINDS[event.kind].typed(event.fields))
        if event.who in self.workers:
            self.workers[event.who].seen_at(event.t)

    @property
    def training_workers(self) -> list[WorkerSummary]:
        """Workers that run lanes now."""
        return [worker for worker in self.workers.values() if worker.state == "training"]

    def worker(self, name: str) -> WorkerSummary:
        found = self.workers.get(name)
        return found if found is not None else self.workers.setdefault(name, WorkerSummary(name))

    def server(self, name: str) -> ServerSummary:
        return self.servers.setdefault(name, ServerSummary(name))

    @property
    def serving_servers(self) -> list[ServerSummary]:
        """Servers that hold all chunks that the table assigns to them."""
        return [server for server in self.servers.values() if server.state == "serving"]

    @property
    def staleness(self) -> tuple[float, int]:
        """Mean and maximum number of steps by which pushes were late, over all pushes so far."""
        stats = [server.stats for server in self.servers.values()]
        pushes = sum(one.get("pushes", 0) for one in stats)
        total = sum(one.get("staleness_mean", 0.0) * one.get("pushes", 0) for one in stats)
        return total / pushes if pushes else 0.0, int(max((one.get("staleness_max", 0) for one in stats), default=0))

    def curve(self, name: str) -> Curve:
        return self.curves.setdefault(name, Curve())

    def note(self, event: Event) -> None:
        self.notes.append(event)
        if len(self.notes) > MAX_NOTES:
            del self.notes[0]


def describe_damage(skipped_rows: int) -> str:
    """What readers say of rows that they could not use; '' if there are none."""
    if not skipped_rows:
        return ""
    return f"{plural(skipped_rows, 'damaged row')} in events.jsonl {'was' if skipped_rows == 1 else 'were'} passed over"


def replay(events: Iterable[Event]) -> RunState:
    state = RunState()
    for event in events:
        state.apply(event)
    return state


# ---- the fold: one function per kind ----

Fields = TypeVar("Fields")
_HANDLERS: dict[str, Callable[[RunState, Event, Any], None]] = {}
_NOTED_KINDS = ("save_failed", "save_skipped", "checkpoint_invalid", "cleanup_failed", "export_skipped", "evicted",
                "refused", "caught_up", "loader_restarted", "alert")  # fmt: skip
"""Kinds that do not change the state but are shown as lines."""


def _folds(
    kind: type[Fields],
) -> Callable[[Callable[[RunState, Event, Fields], None]], Callable[[RunState, Event, Fields], None]]:
    def register(fold: Callable[[RunState, Event, Fields], None]) -> Callable[[RunState, Event, Fields], None]:
        _HANDLERS[kind_name(kind)] = fold
        return fold

    return register


for _kind in _NOTED_KINDS:
    _HANDLERS[_kind] = lambda state, event, fields: state.note(event)


@_folds(schema.RunStartedEvent)
def _run_started(state: RunState, event: Event, started: schema.RunStartedEvent) -> None:
    state.run, state.status, state.starts = started.run, "starting", state.starts + 1
    state.stage = "importing"
    state.pace.interrupt()
    state.error, state.result, state.built_by, state.verified_sha256 = None, {}, "", ""
    state.nobody_left = True  # workers that outlived their driver report their state again
    for server in state.servers.values():
        _release(server, "dead")  # servers that outlived their driver connect again


@_folds(schema.SeatsGivenEvent)
def _seats_given(state: RunState, event: Event, given: schema.SeatsGivenEvent) -> None:
    numbers = [int(found[0]) for name in given.seats if (found := re.search(r"(?<=-)\d{1,8}$", name))]
    state.seats_given = max(state.seats_given, 1 + max(numbers, default=-1))


@_folds(schema.PlanEvent)
def _plan(state: RunState, event: Event, plan: schema.PlanEvent) -> None:
    state.plan = dict(event.fields)
    state.note(event)


@_folds(schema.ReplanEvent)
def _replan(state: RunState, event: Event, replan: schema.ReplanEvent) -> None:
    state.replans.append(dict(event.fields))
    state.note(event)


@_folds(schema.LinkMeasuredEvent)
def _link_measured(state: RunState, event: Event, link: schema.LinkMeasuredEvent) -> None:
    state.links[event.who] = {
        "latency_s": float(link.latency_s),
        "send_bytes_s": float(link.send_bytes_s),
        "receive_bytes_s": float(link.receive_bytes_s),
    }


@_folds(schema.WorkerStartedEvent)
def _worker_started(state: RunState, event: Event, started: schema.WorkerStartedEvent) -> None:
    worker = state.worker(event.who)
    worker.host, worker.pid, worker.state = started.host, started.pid, "starting"
    worker.seen_at(event.t)
    state.facts |= {name: event[name] for name in ("threads", "torch") if name in event.fields}
    state.stage = "opening data" if state.stage == "importing" else state.stage


@_folds(schema.BuiltEvent)
def _built(state: RunState, event: Event, built: schema.BuiltEvent) -> None:
    state.steps_total, state.steps_per_epoch = built.steps, built.steps_per_epoch
    state.facts |= {name: value for name, value in built._asdict().items() if value is not None}
    state.built_by = state.built_by or event.who


@_folds(schema.LayoutEvent)
def _layout(state: RunState, event: Event, layout: schema.LayoutEvent) -> None:
    state.facts |= {"parameters": layout.parameters, "trainable": layout.trainable}
    state.layout, state.inexact = dict(event.fields), layout.why


@_folds(schema.JoinedEvent)
def _joined(state: RunState, event: Event, joined: schema.JoinedEvent) -> None:
    worker = state.worker(event.who)
    if worker.lanes != list(joined.lanes):
        worker.forget_work()
    worker.lanes, worker.state, worker.step = list(joined.lanes), "training", event.step or 0
    worker.is_saver = joined.saves
    worker.seen_at(event.t)
    if not worker.has_joined:
        worker.has_joined = True
        state.times["startup_s"] += max(worker.lifetime_s - worker.loading_s, 0.0)
    state.joined_t = event.t if state.joined_t is None else state.joined_t
    state.stage = "first batch" if state.stage else ""
    state.pace.interrupt()
    if state.nobody_left and state.step and not event.step:
        state.redone += state.step
        state.note(Event("steps_lost", event.t, event.who, 0, {"steps": state.step}))
    state.nobody_left = False
    if joined.saves:  # the event of another worker may be relayed late
        state.step = event.step or 0
    if not state.result:
        state.status = "training"
    state.peak_workers = max(state.peak_workers, len(state.training_workers))


@_folds(schema.ViewEvent)
def _view(state: RunState, event: Event, view: schema.ViewEvent) -> None:
    state.views, state.view_number = state.views + 1, max(state.view_number, view.number)
    for worker in state.training_workers:
        if worker.name not in view.carries:
            worker.state, worker.samples_per_s = "standing", 0.0
    state.last_note_is_repeat = view.why == schema.LANES_MOVE and any(
        one.get("why") == schema.LANES_MOVE for one in state.notes
    )
    if view.why and not state.last_note_is_repeat:
        state.note(event)


@_folds(schema.StoppedEvent)
def _stopped(state: RunState, event: Event, stopped: schema.StoppedEvent) -> None:
    worker = state.worker(event.who)
    worker.state, worker.samples_per_s = "standing", 0.0


@_folds(schema.StepEvent)
def _step(state: RunState, event: Event, row: schema.StepEvent) -> None:
    """A worker made steps. Values that are the same on all workers are taken from the saver."""
    worker = state.worker(event.who)
    worker.step, worker.state = event.step or 0, "training"
    worker.steps += row.steps
    worker.samples += row.samples
    worker.work_s += row.data_s + row.compute_s
    worker.add_work(event.t, steps=row.steps, work_s=row.data_s + row.compute_s)
    state.samples_computed += row.samples
    state.bytes_sent += row.bytes_sent
    state.bytes_plain += row.bytes_sent if row.bytes_plain is None else row.bytes_plain
    for name in TIME_FIELDS:
        if name in event.fields:
            state.times[name] += event.fields[name]
    if row.wall_s > 0:
        worker.samples_per_s = row.samples / row.wall_s
        state.samples_per_s = sum(one.samples_per_s for one in state.training_workers)
    if not worker.is_saver:
        return
    state.step, state.loss, state.lr, state.status = worker.step, row.loss, row.lr, "training"
    state.training_wall_s += max(row.wall_s, 0.0)
    state.stage = ""
    state.pace.add(state.step, event.t, workers=len(state.training_workers))
    if row.wall_s > 0:
        state.facts["steps_per_s"] = row.steps / row.wall_s
    if row.loss is not None:
        state.curve("loss").add(state.step, row.loss)


@_folds(schema.EvaluatedEvent)
def _evaluated(state: RunState, event: Event, row: schema.EvaluatedEvent) -> None:
    step = event.step or 0
    if row.again and step <= state.evaluated_at.get(row.split, -1):
        return
    state.evaluated_at[row.split] = step
    prefix = "" if row.split == "validation" else f"{row.split}/"
    for name, value in row.metrics.items():
        state.metrics[prefix + name] = value
        state.curve(f"{row.split}/{name}").add(step, value)
    state.times["evaluation_s"] += row.evaluation_s * max(len(state.training_workers), 1)  # they evaluate together


@_folds(schema.SelfCheckedEvent)
def _self_checked(state: RunState, event: Event, checked: schema.SelfCheckedEvent) -> None:
    state.lanes_checked += checked.lanes
    state.check_failure = checked.failure
    state.times["checking_s"] += checked.checking_s * max(len(state.training_workers), 1)  # they check together
    if checked.why:
        state.check_difference = state.check_difference or describe_difference(checked.why, checked.objects)
        state.note(event)


def describe_difference(why: str, objects: Sequence[str]) -> str:
    """What a check found, and the objects that may be the cause."""
    return f"{why} (not in a checkpoint, and different: {', '.join(objects)})" if objects else why


@_folds(schema.BestEvent)
def _best(state: RunState, event: Event, best: schema.BestEvent) -> None:
    step = event.step or 0
    if not best.again or step > state.best.get("step", -1):
        state.best = {best.metric: best.value, "step": step}


@_folds(schema.SavedEvent)
def _saved(state: RunState, event: Event, saved: schema.SavedEvent) -> None:
    state.saves, state.saved_step = state.saves + 1, event.step
    state.bytes_saved += saved.written_bytes
    state.times["saving_s"] += saved.stall_s
    if saved.recovered:
        state.note(event)


@_folds(schema.NoteEvent)
def _note(state: RunState, event: Event, note: schema.NoteEvent) -> None:
    state.last_note_is_repeat = any(one.kind == "note" and one["message"] == note.message for one in state.notes)
    if not state.last_note_is_repeat:
        state.note(event)


@_folds(schema.WeightsLoadedEvent)
def _weights_loaded(state: RunState, event: Event, loaded: schema.WeightsLoadedEvent) -> None:
    state.last_note_is_repeat = state.weights_loaded == event.fields
    if not state.last_note_is_repeat:
        # The first counts: workers that come later get the state of the others, whatever their own file has.
        state.weights_loaded = state.weights_loaded or dict(event.fields)
        state.note(event)


@_folds(schema.ResumedEvent)
def _resumed(state: RunState, event: Event, resumed: schema.ResumedEvent) -> None:
    state.times["recovery_s"] += resumed.recovery_s
    worker = state.worker(event.who)
    worker.loading_s += 0.0 if worker.has_joined else resumed.recovery_s
    state.redone += max(state.step - (event.step or 0), resumed.redone, 0)
    state.nobody_left = False
    state.note(event)


@_folds(schema.WorkerDiedEvent)
def _worker_died(state: RunState, event: Event, died: schema.WorkerDiedEvent) -> None:
    state.deaths += 1
    worker = state.worker(died.worker)
    worker.state, worker.samples_per_s, worker.usage = "dead", 0.0, {}
    state.links.pop(died.worker, None)
    state.nobody_left = not any(one.state in ("training", "standing") for one in state.workers.values())
    state.note(event)


@_folds(schema.UsageEvent)
def _usage(state: RunState, event: Event, usage: schema.UsageEvent) -> None:
    if usage.worker in state.workers:
        numbers = {name: value for name, value in event.fields.items() if name != "worker" and value is not None}
        state.workers[usage.worker].usage = numbers


@_folds(schema.ServersWantedEvent)
def _servers_wanted(state: RunState, event: Event, wanted: schema.ServersWantedEvent) -> None:
    state.wanted_servers = wanted.number
    if wanted.why:
        state.note(event)


@_folds(schema.ServerStartedEvent)
def _server_started(state: RunState, event: Event, started: schema.ServerStartedEvent) -> None:
    server = state.server(started.server)
    server.host, server.pid, server.state = started.host, started.pid, "starting"


@_folds(schema.ServerDiedEvent)
def _server_died(state: RunState, event: Event, died: schema.ServerDiedEvent) -> None:
    state.server_deaths += 1
    _release(state.server(died.server), "dead")
    state.note(event)


@_folds(schema.ServerLeftEvent)
def _server_left(state: RunState, event: Event, left: schema.ServerLeftEvent) -> None:
    _release(state.server(left.server), "left")
    state.note(event)


def _release(server: ServerSummary, state: str) -> None:
    server.state = state
    server.set_held_bytes()


@_folds(schema.ServersLostEvent)
def _servers_lost(state: RunState, event: Event, lost: schema.ServersLostEvent) -> None:
    for server in state.servers.values():
        if server.state in ("serving", "filling"):
            _release(server, "starting")
    state.note(event)


@_folds(schema.ChunkTableEvent)
def _chunk_table(state: RunState, event: Event, table: schema.ChunkTableEvent) -> None:
    state.chunk_table_number = table.number
    state.failovers += table.failovers
    for name, held in table.servers.items():
        server = state.server(name)
        server.set_held_bytes(
            primary_bytes=held.get("primary_bytes", 0),
            backup_bytes=held.get("backup_bytes", 0),
            filling_bytes=held.get("filling_bytes", 0),
        )
        server.state = "filling" if server.filling_bytes else "serving"
    for server in state.servers.values():
        if server.name not in table.servers and server.state in ("serving", "filling"):
            _release(server, "leaving")
    state.peak_servers = max(state.peak_servers, len(table.servers))


@_folds(schema.ServerStatsEvent)
def _server_stats(state: RunState, event: Event, row: schema.ServerStatsEvent) -> None:
    state.server(row.server).stats = dict(row.stats)


@_folds(schema.ResidualLostEvent)
def _residual_lost(state: RunState, event: Event, lost: schema.ResidualLostEvent) -> None:
    state.lost_residuals.append(LostResidual(lost.lane, lost.worker, event.step))
    state.note(event)


@_folds(schema.LeftEvent)
def _left(state: RunState, event: Event, left: schema.LeftEvent) -> None:
    worker = state.worker(event.who)
    worker.state, worker.step = "left", event.step or worker.step
    state.links.pop(event.who, None)


@_folds(schema.FinishedEvent)
def _finished(state: RunState, event: Event, finished: schema.FinishedEvent) -> None:
    state.result, state.step = dict(event.fields), event.step or 0
    state.metrics |= finished.metrics
    state.times["export_s"] += finished.export_s
    for worker in state.training_workers:
        worker.seen_at(event.t)  # the others wait for the one that finishes
    state.worker(event.who).state = "finished"


@_folds(schema.VerifiedEvent)
def _verified(state: RunState, event: Event, verified: schema.VerifiedEvent) -> None:
    state.verified_sha256 = verified.weights_sha256


@_folds(schema.FailedEvent)
def _failed(state: RunState, event: Event, failed: schema.FailedEvent) -> None:
    state.error = failed._asdict()
    member = state.server(event.who) if event.who.startswith("server-") else state.worker(event.who)
    member.state = "failed"


@_folds(schema.RunEndedEvent)
def _run_ended(state: RunState, event: Event, ended: schema.RunEndedEvent) -> None:
    state.status, state.stage = ended.status, ""
