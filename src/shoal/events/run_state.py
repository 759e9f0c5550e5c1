"""A picture of a run, folded from its events. Display, receipt, `show` and `compare` all look at this one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.events.stream import Event

MAX_POINTS = 4096
TIME_FIELDS = ("data_s", "compute_s", "exchange_s", "waiting_s", "saving_s", "evaluation_s", "recovery_s")


@dataclass
class WorkerSummary:
    """What is known of one worker."""

    name: str
    host: str = ""
    pid: int = 0
    lanes: list[int] = field(default_factory=list)
    is_saver: bool = True
    step: int = 0
    steps: int = 0
    samples: int = 0
    work_s: float = 0.0
    samples_per_s: float = 0.0
    state: str = "starting"


@dataclass
class ServerSummary:
    """What is known of one server. `served` are the numbers that it last told: pushes, bytes_in, bytes_out, bytes_plain
    (what bytes_in would have been without a codec), staleness_mean, staleness_max."""

    name: str
    host: str = ""
    pid: int = 0
    state: str = "starting"
    primary_bytes: int = 0
    backup_bytes: int = 0
    filling_bytes: int = 0
    stats: dict[str, float] = field(default_factory=dict)

    def set_held_bytes(self, *, primary_bytes: int = 0, backup_bytes: int = 0, filling_bytes: int = 0) -> None:
        self.primary_bytes, self.backup_bytes, self.filling_bytes = primary_bytes, backup_bytes, filling_bytes


@dataclass
class Curve:
    """A series over steps. Bounded: when it is full, every other point is forgotten."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, step: int, value: float) -> None:
        while self.steps and self.steps[-1] >= step:  # a run that was resumed writes some steps again
            self.steps.pop()
            self.values.pop()
        self.steps.append(step)
        self.values.append(value)
        if len(self.steps) > MAX_POINTS:
            self.steps, self.values = self.steps[1::2], self.values[1::2]


@dataclass
class RunState:
    """The state of a run as its events tell it."""

    status: str = "created"
    run: str = ""
    steps_total: int = 0
    steps_per_epoch: int = 0
    step: int = 0
    loss: float | None = None
    lr: float | None = None
    samples_per_s: float = 0.0
    samples_computed: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    evaluated_at: dict[str, int] = field(default_factory=dict)
    workers: dict[str, WorkerSummary] = field(default_factory=dict)
    servers: dict[str, ServerSummary] = field(default_factory=dict)
    chunk_table_number: int = 0
    wanted_servers: int = 0
    peak_servers: int = 0
    server_deaths: int = 0
    failovers: int = 0
    curves: dict[str, Curve] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIME_FIELDS, 0.0))
    starts: int = 0
    deaths: int = 0
    redone: int = 0
    last_note_is_repeat: bool = False
    """The newest note was known: all workers have it."""
    nobody_left: bool = False
    """Nobody is left who trained: what was not saved is lost."""
    layout: str = ""
    inexact: str = ""
    """Why the layout gives another result than one process, as those who made it found."""
    views: int = 0
    peak_workers: int = 0
    saves: int = 0
    saved_step: int | None = None
    bytes_saved: int = 0
    bytes_sent: int = 0
    bytes_plain: int = 0
    lost_residuals: list[str] = field(default_factory=list)
    started_t: float | None = None
    last_event_t: float = 0.0
    error: dict[str, str] | None = None
    result: dict[str, Any] = field(default_factory=dict)
    built_by: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    replans: list[dict[str, Any]] = field(default_factory=list)
    links: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def epoch(self) -> float:
        return self.step / self.steps_per_epoch if self.steps_per_epoch else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end at the present speed."""
        rate = self.facts.get("steps_per_s", 0.0)
        return (self.steps_total - self.step) / rate if rate and self.steps_total else None

    def apply(self, event: Event) -> None:
        self.last_event_t = event.t
        if self.started_t is None:
            self.started_t = event.t
        handler = _HANDLERS.get(event.kind)
        if handler:
            handler(self, event)

    @property
    def training_workers(self) -> list[WorkerSummary]:
        """Those who carry lanes now."""
        return [worker for worker in self.workers.values() if worker.state == "training"]

    def worker(self, name: str) -> WorkerSummary:
        return self.workers.setdefault(name, WorkerSummary(name))

    def server(self, name: str) -> ServerSummary:
        return self.servers.setdefault(name, ServerSummary(name))

    @property
    def serving_servers(self) -> list[ServerSummary]:
        """Those who hold all that they should."""
        return [server for server in self.servers.values() if server.state == "serving"]

    @property
    def staleness(self) -> tuple[float, int]:
        """Over all pushes so far: by how many steps they were late, on average and at most."""
        served = [server.stats for server in self.servers.values()]
        pushes = sum(one.get("pushes", 0) for one in served)
        total = sum(one.get("staleness_mean", 0.0) * one.get("pushes", 0) for one in served)
        return total / pushes if pushes else 0.0, int(max((one.get("staleness_max", 0) for one in served), default=0))

    def curve(self, name: str) -> Curve:
        return self.curves.setdefault(name, Curve())


def replay(events: Iterable[Event]) -> RunState:
    picture = RunState()
    for event in events:
        picture.apply(event)
    return picture


def _run_started(p: RunState, e: Event) -> None:
    p.run, p.status, p.starts = str(e["run"]), "starting", p.starts + 1
    p.error, p.result, p.built_by = None, {}, ""
    p.nobody_left = True  # those that outlived their driver know what they hold
    for server in p.servers.values():
        _release(server, "dead")  # those that outlived their driver are told of again


def _plan(p: RunState, e: Event) -> None:
    p.plan = dict(e.fields)
    p.notes.append(f"plan: {describe_choice(p.plan['choice'])}: {p.plan['reason']}")


def _replan(p: RunState, e: Event) -> None:
    p.replans.append(dict(e.fields))
    said, true = (1000 * e[what]["step_s"] for what in ("prediction", "truth"))
    p.notes.append(f"plan: a step takes {true:.3g} ms instead of {said:.3g} ms; {e['reason']}")


def _link_measured(p: RunState, e: Event) -> None:
    """By a worker on another host than the one who taught it."""
    p.links[e.who] = {name: float(e[name]) for name in ("latency_s", "send_bytes_s", "receive_bytes_s")}


def describe_choice(choice: Mapping[str, Any]) -> str:
    """A choice of a plan, in a few words."""
    number, hosts, threads = (int(choice.get(what, 1)) for what in ("workers", "hosts", "threads"))
    parts = [f"{number} worker{'s' if number > 1 else ''}", f"({choice['how']})"]
    parts += [f"on {hosts} hosts"] if hosts > 1 else []
    parts += [f"with {threads} threads each"] if threads > 1 else []
    return " ".join(parts)


def _worker_started(p: RunState, e: Event) -> None:
    worker = p.worker(e.who)
    worker.host, worker.pid, worker.state = str(e.get("host", "")), int(e.get("pid", 0)), "starting"
    p.facts |= {k: e[k] for k in ("device", "threads", "torch") if k in e.fields}


def _built(p: RunState, e: Event) -> None:
    p.steps_total, p.steps_per_epoch = int(e["steps"]), int(e["steps_per_epoch"])
    p.facts |= e.fields
    p.built_by = p.built_by or e.who


def _layout(p: RunState, e: Event) -> None:
    p.facts |= {k: e[k] for k in ("parameters", "trainable")}
    cuts = f", cut at {', '.join(e['cuts'])}" if e["cuts"] else ""
    replicas = "1 replica" if e["replicas"] == 1 else f"{e['replicas']} replicas"
    p.layout = f"shard: {e['shard']} over {e['ways']}, {replicas}{cuts}"
    p.inexact = str(e.get("why", ""))


def _joined(p: RunState, e: Event) -> None:
    worker = p.worker(e.who)
    worker.lanes, worker.state, worker.step = list(e["lanes"]), "training", int(e.step or 0)
    worker.is_saver = bool(e.get("saves", True))
    if p.nobody_left and p.step and not e.step:
        p.redone += p.step
        p.notes.append(f"nothing was saved: {p.step} steps are made again")
    p.nobody_left = False
    p.step, p.status = int(e.step or 0), "training"
    p.peak_workers = max(p.peak_workers, len(p.training_workers))


def _view(p: RunState, e: Event) -> None:
    p.views += 1
    for worker in p.training_workers:
        if worker.name not in e.get("carries", {}):
            worker.state, worker.samples_per_s = "standing", 0.0
    if e.get("why"):
        p.notes.append(str(e["why"]))


def _stopped(p: RunState, e: Event) -> None:
    worker = p.worker(e.who)
    worker.state, worker.samples_per_s = "standing", 0.0


def _evicted(p: RunState, e: Event) -> None:
    host = f" on {e['host']}" if e.get("host") else ""
    p.notes.append(f"{e.get('worker') or e['server']}{host} is put out: {e['reason']}")


def _caught_up(p: RunState, e: Event) -> None:
    source = str(e["source"])
    p.notes.append(f"{e.who} got step {e.step} from {source if ' ' in source else f'the memory of {source}'}")


def _step(p: RunState, e: Event) -> None:
    """One worker's steps. What all workers know alike is taken from the one that saves."""
    worker = p.worker(e.who)
    steps, samples, wall = int(e.get("steps", 1)), int(e.get("samples", 0)), float(e.get("wall_s", 0.0))
    worker.step, worker.state = int(e.step or 0), "training"
    worker.steps += steps
    worker.samples += samples
    worker.work_s += float(e.get("data_s", 0.0)) + float(e.get("compute_s", 0.0))
    p.samples_computed += samples
    p.bytes_sent += int(e.get("bytes_sent", 0))
    p.bytes_plain += int(e.get("bytes_plain", e.get("bytes_sent", 0)))
    for name in TIME_FIELDS:
        p.times[name] += float(e.get(name, 0.0))
    if wall > 0:
        worker.samples_per_s = samples / wall
        p.samples_per_s = sum(one.samples_per_s for one in p.training_workers)
    if not worker.is_saver:
        return
    p.step, p.loss, p.lr, p.status = worker.step, e.get("loss"), e.get("lr"), "training"
    if wall > 0:
        p.facts["steps_per_s"] = steps / wall
    if p.loss is not None:
        p.curve("loss").add(p.step, p.loss)


def _evaluated(p: RunState, e: Event) -> None:
    step = int(e.step or 0)
    if e.get("again") and step <= p.evaluated_at.get(e["part"], -1):
        return
    p.evaluated_at[e["part"]] = step
    prefix = "" if e["part"] == "validation" else f"{e['part']}/"
    for name, value in e["metrics"].items():
        p.metrics[prefix + name] = value
        p.curve(f"{e['part']}/{name}").add(step, value)
    p.times["evaluation_s"] += float(e.get("evaluation_s", 0.0))


def _best(p: RunState, e: Event) -> None:
    if not e.get("again") or int(e.step or 0) > p.best.get("step", -1):
        p.best = {str(e["metric"]): e["value"], "step": int(e.step or 0)}


def _saved(p: RunState, e: Event) -> None:
    p.saves, p.saved_step = p.saves + 1, e.step
    p.bytes_saved += int(e.get("written_bytes", 0))
    p.times["saving_s"] += float(e.get("stall_s", 0.0))


def _note(p: RunState, e: Event) -> None:
    text = str(e.get("message") or e.get("reason") or "")
    if e.kind != "note":
        p.notes.append(f"{e.kind.replace('_', ' ')}: {text}")
        return
    p.last_note_is_repeat = text in p.notes
    if not p.last_note_is_repeat:
        p.notes.append(text)


def _resumed(p: RunState, e: Event) -> None:
    p.times["recovery_s"] += float(e.get("recovery_s", 0.0))
    p.redone += max(p.step - int(e.step or 0), int(e.get("redone", 0)), 0)
    p.nobody_left = False
    p.notes.append(f"resumed at step {e.step} from {e.get('source', 'a checkpoint')}")


def _worker_died(p: RunState, e: Event) -> None:
    p.deaths += 1
    worker = p.worker(str(e["worker"]))
    worker.state, worker.samples_per_s = "dead", 0.0
    p.links.pop(str(e["worker"]), None)
    p.nobody_left = not any(one.state in ("training", "standing") for one in p.workers.values())
    p.notes.append(f"{e['worker']} died: {e['reason']}")


def _servers_wanted(p: RunState, e: Event) -> None:
    p.wanted_servers = int(e["number"])
    if e.get("why"):
        p.notes.append(f"{e['number']} servers are wanted: {e['why']}")


def _server_started(p: RunState, e: Event) -> None:
    server = p.server(str(e["server"]))
    server.host, server.pid, server.state = str(e.get("host", "")), int(e.get("pid", 0)), "starting"


def _server_died(p: RunState, e: Event) -> None:
    p.server_deaths += 1
    _release(p.server(str(e["server"])), "dead")
    p.notes.append(f"{e['server']} died: {e['reason']}")


def _server_left(p: RunState, e: Event) -> None:
    _release(p.server(str(e["server"])), "left")
    p.notes.append(f"{e['server']} left")


def _release(server: ServerSummary, state: str) -> None:
    server.state = state
    server.set_held_bytes()


def _servers_lost(p: RunState, e: Event) -> None:
    for server in p.servers.values():
        if server.state in ("serving", "filling"):
            _release(server, "starting")
    p.notes.append(f"servers lost: {e['reason']}")


def _chunk_table(p: RunState, e: Event) -> None:
    p.chunk_table_number = int(e["number"])
    p.failovers += int(e.get("failovers", 0))
    for name, held in e["servers"].items():
        server = p.server(name)
        server.set_held_bytes(**held)
        server.state = "filling" if server.filling_bytes else "serving"
    for server in p.servers.values():
        if server.name not in e["servers"] and server.state in ("serving", "filling"):
            _release(server, "leaving")
    p.peak_servers = max(p.peak_servers, len(e["servers"]))


def _server_stats(p: RunState, e: Event) -> None:
    p.server(str(e["server"])).stats = dict(e["served"])


def _residual_lost(p: RunState, e: Event) -> None:
    with_whom = f" with {e['worker']}" if e.get("worker") else ""
    p.lost_residuals.append(f"what lane {e['lane']} remembered was lost{with_whom} at step {e.step}")
    p.notes.append(p.lost_residuals[-1])


def _left(p: RunState, e: Event) -> None:
    p.worker(e.who).state = "left"
    p.links.pop(e.who, None)


def _finished(p: RunState, e: Event) -> None:
    p.result, p.step = dict(e.fields), int(e.step or 0)
    p.metrics |= e.get("metrics", {})
    p.worker(e.who).state = "finished"


def _failed(p: RunState, e: Event) -> None:
    p.error = {k: str(v) for k, v in e.fields.items()}
    member = p.server(e.who) if e.who.startswith("server-") else p.worker(e.who)
    member.state = "failed"


def _run_ended(p: RunState, e: Event) -> None:
    p.status = str(e["status"])


_HANDLERS = {
    "run_started": _run_started,
    "plan": _plan,
    "replan": _replan,
    "link_measured": _link_measured,
    "worker_started": _worker_started,
    "built": _built,
    "joined": _joined,
    "layout": _layout,
    "step": _step,
    "evaluated": _evaluated,
    "best": _best,
    "saved": _saved,
    "save_failed": _note,
    "save_skipped": _note,
    "checkpoint_invalid": _note,
    "cleanup_failed": _note,
    "export_skipped": _note,
    "note": _note,
    "view": _view,
    "stopped": _stopped,
    "put_out": _evicted,
    "caught_up": _caught_up,
    "resumed": _resumed,
    "worker_died": _worker_died,
    "servers_wanted": _servers_wanted,
    "server_started": _server_started,
    "server_died": _server_died,
    "server_left": _server_left,
    "servers_lost": _servers_lost,
    "table": _chunk_table,
    "served": _server_stats,
    "memory_lost": _residual_lost,
    "left": _left,
    "finished": _finished,
    "failed": _failed,
    "run_ended": _run_ended,
}
