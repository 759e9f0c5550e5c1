"""Routes that read: runs, series, events, logs, receipts, comparisons, disk use. None of them changes anything."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

import shoal
from shoal.errors import ShoalError, error, single_errors
from shoal.events import LineTail, RunState, describe_damage
from shoal.events.packed_file import packed_path, size_of_content
from shoal.events.schema import to_row
from shoal.events.stream import parse_event
from shoal.jobs import run_dir, run_index
from shoal.plan.stragglers import slowest_worker
from shoal.spec.alerts.config import hide_webhooks
from shoal.spec.base import Spec
from shoal.spec.receipt import FoldsReceipt, read_receipt_file
from shoal.spec.run_paths import RunPaths
from shoal.storage import logs
from shoal.storage.disk_usage import all_usage
from shoal.storage.tags import read_tags
from shoal.storage.trash import list_trash
from shoal.terminal import notes, plan_lines
from shoal.web import answers
from shoal.web.table import Call

if TYPE_CHECKING:  # they load numpy, which the start of the server does without
    from shoal.storage.history import RunHistory
    from shoal.storage.pyramid import Bins, Parting, Series

MAX_NOTES_SHOWN = 100
MAX_COMPARED = 100
MAX_JOB_BYTES = 1 << 20
SEARCH_S = 10.0


class SeriesQuery(Spec):
    """`from` and `to` are steps; `points`: at most so many bins."""

    names: str = Field("", max_length=2000)
    first: int = Field(0, ge=0, lt=1 << 62, alias="from")
    last: int = Field((1 << 62) - 1, ge=0, lt=1 << 62, alias="to")
    points: int = Field(600, ge=2, le=5000)


class EventsQuery(Spec):
    after: int = Field(0, ge=0, lt=1 << 62)
    kind: str = Field("", max_length=40)
    who: str = Field("", max_length=40)
    limit: int = Field(500, ge=1, le=5000)


class TimelineQuery(Spec):
    bins: int = Field(120, ge=1, le=1000)


class LogQuery(Spec):
    """Lines after a byte, or the last lines."""

    after: int | None = Field(None, ge=0, lt=1 << 62)
    tail: int = Field(200, ge=1, le=2000)


class SearchQuery(Spec):
    find: str = Field(min_length=1, max_length=200)
    who: str = Field("", max_length=40)
    limit: int = Field(200, ge=1, le=1000)


class CompareQuery(Spec):
    runs: str = Field(min_length=1, max_length=8000)


class DiffQuery(Spec):
    other: str = Field(min_length=1, max_length=300, alias="with")


class StorageQuery(Spec):
    limit: int = Field(100, ge=1, le=1000)


def health(call: Call) -> answers.HealthAnswer:
    return answers.HealthAnswer(ok=True)


def me(call: Call) -> answers.IdentityAnswer:
    who = call.identity
    runs = None if who.runs is None else sorted(who.runs)
    return answers.IdentityAnswer(
        name=who.name, role=who.role, runs=runs, expires_t=who.expires_t, version=shoal.__version__
    )


def show_run(call: Call) -> answers.RunPage:
    paths = call.paths
    offset = 0
    with contextlib.suppress(OSError):
        offset = size_of_content(paths.events)  # before the state: what comes meanwhile is in both
    tags = read_tags(call.site.runs).get(paths.name, [])
    return make_run_page(paths, call.site.state(paths), run=call.names["run"], tags=tags, offset=offset)


def make_run_page(paths: RunPaths, state: RunState, *, run: str, tags: list[str], offset: int) -> answers.RunPage:
    return answers.RunPage(
        run=run,
        name=paths.name,
        status=_status(state, paths),
        step=state.step,
        steps=state.steps_total,
        epoch=state.epoch,
        loss=state.loss,
        lr=state.lr,
        eta_s=state.eta_s,
        samples_per_s=state.samples_per_s,
        metrics=dict(state.metrics) if state.steps_total else dict(run_index.fold_means(paths)),
        best=dict(state.best),
        times=state.times,
        workers=_workers(state),
        peak_workers=state.peak_workers,
        servers=[_server(one) for one in state.servers.values()],
        folds=[f"{run}~{one.name}" for one in paths.folds],
        notes=notes.note_lines(state)[-MAX_NOTES_SHOWN:],
        error=state.error,
        plan=plan_lines.plan_lines(state),
        deaths=state.deaths,
        starts=state.starts,
        views=state.views,
        started_t=state.started_t,
        last_event_t=state.last_event_t,
        weights_sha256=str(state.result.get("weights_sha256", "")),
        damage=describe_damage(state.skipped_rows),
        tags=tags,
        packed=not paths.events.exists() and packed_path(paths.events).exists(),
        offset=offset,
    )


def _status(state: RunState, paths: RunPaths) -> str:
    """A search makes no steps of its own: its journal says how it is."""
    if paths.search_journal.is_file():
        return str(run_index.list_row(paths)["status"])
    return run_dir.current_status(state.status, paths)


def _workers(state: RunState) -> list[answers.WorkerRow]:
    slowest = _slowest(state)
    return [
        answers.WorkerRow(
            name=one.name,
            host=one.host,
            state=one.state,
            lanes=one.lanes if one.state == "training" else [],
            saves=one.is_saver,
            step=one.step,
            samples=one.samples,
            samples_per_s=one.samples_per_s,
            holds_back=slowest.get(one.name, 0.0),
            usage=one.usage,
        )
        for one in state.workers.values()
    ]


def _slowest(state: RunState) -> dict[str, float]:
    """Of the workers that train: the slowest of late, and how much less time the others need."""
    found = slowest_worker({one.name: one.step_work_s or 0.0 for one in state.training_workers})
    return {} if found is None else {found[0]: found[1]}


def _server(one: Any) -> answers.ServerRow:
    return answers.ServerRow(
        name=one.name, host=one.host, state=one.state, primary_bytes=one.primary_bytes, backup_bytes=one.backup_bytes
    )


def show_series(call: Call) -> answers.SeriesList:
    query: SeriesQuery = call.query
    asked = [name for name in query.names.split(",") if name]
    with call.site.histories.use(call.paths) as history, run_dir.readable(call.paths):
        history.catch_up()
        names = sorted(history.series)
        chosen = [name for name in (asked or names) if name in history.series][:MAX_COMPARED]
        series = [make_series_page(name, history.series[name], query) for name in chosen]
        return answers.SeriesList(run=call.names["run"], step=history.step, names=names, series=series)


def make_series_page(name: str, series: Series, query: SeriesQuery) -> answers.SeriesPage:
    found = series.bins(first=query.first, last=query.last, at_most=query.points)
    single = found.are_single
    return answers.SeriesPage(
        name=name,
        points=int(found.count.sum()),
        step=found.steps.tolist(),
        t=[round(one, 3) for one in found.t.tolist()],
        last=_values(found.last),
        least=[] if single else _values(found.least),
        most=[] if single else _values(found.most),
        not_finite=_not_finite(found),
    )


def _values(column: Any) -> list[float | str | None]:
    return [None if math.isnan(one) else one for one in column.tolist()]


def _not_finite(found: Bins) -> list[int]:
    steps: list[int] = found.steps[found.not_finite > 0].tolist()
    return steps


def show_events(call: Call) -> answers.EventsPage:
    query: EventsQuery = call.query
    rows: list[dict[str, Any]] = []
    with run_dir.readable(call.paths):
        after = min(query.after, size_of_content(call.paths.events))
        tail = LineTail(call.paths.events, offset=after)  # no file system seeks to any number
        for line in tail.read_new_bytes():
            event = parse_event(line)
            if event and (not query.kind or event.kind == query.kind) and (not query.who or event.who == query.who):
                rows.append(to_row(event))
            if len(rows) >= query.limit or tail.offset - query.after > 1 << 26:
                break
    return answers.EventsPage(run=call.names["run"], start=query.after, end=tail.offset, rows=rows)


def show_timeline(call: Call) -> answers.TimelinePage:
    with call.site.histories.use(call.paths) as history, run_dir.readable(call.paths):
        history.catch_up()
        return make_timeline(history, bins=call.query.bins)


def make_timeline(history: RunHistory, *, bins: int) -> answers.TimelinePage:
    width_s, columns = history.timeline.columns(bins=bins)
    marks: list[dict[str, Any]] = [dict(mark) for mark in history.marks]
    return answers.TimelinePage(
        started_t=history.started_t,
        start_t=history.timeline.start_t,
        width_s=width_s,
        workers=columns,
        marks=marks,
        left_out=history.left_out,
    )


def list_logs(call: Call) -> list[answers.LogRow]:
    return [answers.LogRow(name=one.name, size_bytes=one.size_bytes) for one in logs.list_logs(call.paths)]


def show_log(call: Call) -> answers.LogLines:
    query: LogQuery = call.query
    name = call.names["log"]
    if query.after is None:
        piece = logs.read_tail(call.paths, name, lines=query.tail)
    else:
        piece = logs.read_after(call.paths, name, offset=query.after)
    return answers.LogLines(name=name, **piece._asdict())


def search_logs(call: Call) -> answers.FoundLines:
    query: SearchQuery = call.query
    names, until_s = logs.names_of(call.paths, query.who), time.monotonic() + SEARCH_S

    def is_over() -> bool:
        return call.site.stopping.is_set() or time.monotonic() > until_s

    found = list(logs.search(call.paths, names, text=query.find, at_most=query.limit + 1, is_over=is_over))
    matches = [answers.FoundLine(**one._asdict()) for one in found[: query.limit]]
    return answers.FoundLines(text=query.find, matches=matches, more=len(found) > query.limit or is_over())


def show_receipt(call: Call) -> answers.ReceiptAnswer:
    stored = read_receipt_file(call.paths.receipt)
    receipt = stored.found.model_dump(mode="python") if stored.found else None
    return answers.ReceiptAnswer(receipt=receipt, damage=stored.damage)


def show_job(call: Call) -> answers.JobText:
    descriptor = os.open(call.paths.job, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        text = file.read(MAX_JOB_BYTES).decode(errors="replace")
    return answers.JobText(run=call.names["run"], yaml=hide_webhooks(text))


def diff_runs(call: Call) -> answers.Comparison:
    return _compare(call, [call.names["run"], call.query.other])


def compare_runs(call: Call) -> answers.Comparison:
    names = list(dict.fromkeys(name for name in call.query.runs.split(",") if name))
    if not 1 <= len(names) <= MAX_COMPARED:
        raise error("SH609", f"{len(names)} runs", where="runs", fix=f"Name 1 to {MAX_COMPARED} runs.")
    return _compare(call, names)


def _compare(call: Call, names: list[str]) -> answers.Comparison:
    every = [call.find(name) for name in names]
    columns = [_column(paths, name) for paths, name in zip(every, names, strict=True)]
    keys = list(dict.fromkeys(key for column in columns for key in column))
    fields = {key: [_plain(column.get(key)) for column in columns] for key in keys}
    differs = [key for key, values in fields.items() if any(one != values[0] for one in values)]
    weights = [_weights(call, paths) for paths in every]
    same = None if not all(weights) else len(set(weights)) == 1
    part = _first_difference(call, *every) if len(every) == 2 and same is not True else None
    return answers.Comparison(
        runs=names,
        fields=fields,
        differs=differs,
        same_bits=same,
        part_after=part and part.after,
        part_at=part and part.at,
    )


def _column(paths: RunPaths, name: str) -> dict[str, Any]:
    """An error names the run: there may be a hundred of them."""
    try:
        return run_index.comparison_column(paths)
    except ShoalError as failure:
        one = next(iter(single_errors(failure)), failure)
        raise error(one.code, f"'{name}': {one.message}", where=one.where, fix=one.fix) from failure


def _weights(call: Call, paths: RunPaths) -> tuple[str, ...]:
    """The SHA-256 of the weights of a run, or of all folds of one; nothing if there are none yet."""
    if paths.search_journal.is_file():
        weights = run_index.run_summary(paths)["weights_sha256"]
        return (weights,) if weights else ()
    found = read_receipt_file(paths.receipt).found
    if isinstance(found, FoldsReceipt):
        return tuple(one.weights_sha256 for one in found.folds)
    own = call.site.state(paths).result.get("weights_sha256")
    return (own,) if own else ()


def _plain(value: Any) -> float | str | bool | None:
    if isinstance(value, int | float | bool) or value is None:
        return value
    return hide_webhooks(str(value))


def _first_difference(call: Call, one: RunPaths, other: RunPaths) -> Parting | None:
    """Where their losses part; None if they do not."""
    from shoal.storage.pyramid import Series, first_difference

    with call.site.histories.use(one) as history:
        history.catch_up()
        mine = history.series.get("loss", Series()).points()
    with call.site.histories.use(other) as history:
        history.catch_up()
        return first_difference(mine, history.series.get("loss", Series()).points())


def show_storage(call: Call) -> answers.StorageAnswer:
    every = all_usage(call.site.runs)
    disk = shutil.disk_usage(call.site.runs)
    rows = [
        answers.UsageRow(
            run=one.run,
            size_bytes=one.total.size_bytes,
            freed_bytes=one.total.freed_bytes,
            shared_bytes=one.total.shared_bytes,
            files=one.total.files,
            parts={name: part.freed_bytes for name, part in one.parts.items()},
            may_drop=(call.site.runs / one.run / "checkpoints").is_dir(),
        )
        for one in every[: call.query.limit]
    ]
    return answers.StorageAnswer(
        free_bytes=disk.free,
        full_in_s=call.site.full_in_s(),
        total_bytes=disk.total,
        size_bytes=sum(one.total.size_bytes for one in every),
        freed_bytes=sum(one.total.freed_bytes for one in every),
        runs=len(every),
        rows=rows,
        trash=[
            answers.TrashRow(entry=one.name, **{k: one.fields[k] for k in _TRASH_FIELDS})
            for one in list_trash(call.site.runs)
        ],
    )


_TRASH_FIELDS: tuple[Literal["run", "part", "t", "size_bytes"], ...] = ("run", "part", "t", "size_bytes")
