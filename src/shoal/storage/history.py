"""The history of one run, made from its events in one pass: series, timeline, and what happened to its workers.

A file beside the stream saves the work, so that a reader folds only newer rows. The stream is the truth: the file is
checked before use (digests, version, every type, and that it belongs to this stream), and made again if it is damaged.
It may be deleted at any time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

from shoal.events import Event, EventReader
from shoal.events.checks import Count, make_check
from shoal.events.packed_file import open_content, size_of_content, stat_content
from shoal.events.run_state import TIME_FIELDS
from shoal.events.snapshot import content_digest, stream_sample
from shoal.spec.run_paths import RunPaths
from shoal.storage.pyramid import Series
from shoal.storage.timeline import TimelineFields, WorkerTimeline

VERSION = 4
MAX_MARKS = 2000
MIN_NEW_BYTES = 1 << 20
"""Bytes that a reader must have folded before it writes the file again."""
MIN_FREE_BYTES = 256 << 20
"""The file is not written if it would leave less than this: the run needs the disk more."""
MAX_HEADER_BYTES = 1 << 26
MARKED_KINDS = frozenset({
    "run_started", "view", "worker_died", "server_died", "evicted", "left", "server_left", "resumed", "saved",
    "save_failed", "replan", "servers_lost", "residual_lost", "failed", "finished", "run_ended",
})  # fmt: skip

EXPECTED, MEASURED = "step s/expected", "step s/measured"
"""Seconds of a step: what the plan says, and what it took. Only planned runs have them."""


class Mark(TypedDict):
    """Something that happened to the run, to a worker or to a server. `carries`: lanes by worker, of a view."""

    t: float
    step: Count | None
    kind: str
    who: str
    carries: dict[str, list[Count]]


class SeriesFields(TypedDict):
    points: Count
    start_t: float


class HistoryHeader(TypedDict):
    """`series`: number of points and time of the first, by name, in the order of the content. A point has 20 bytes."""

    version: Count
    offset: Count
    sample: str
    content: str
    series: dict[str, SeriesFields]
    timeline: TimelineFields
    marks: list[Mark]
    left_out: Count
    savers: dict[str, bool]
    speeds: dict[str, float]
    step: Count


_is_header: Callable[[Any], bool] = make_check(HistoryHeader)


class RunHistory:
    """Follows the stream of a run. Belongs to one thread at a time."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._start_again()
        self._load()

    def _start_again(self) -> None:
        self.series: defaultdict[str, Series] = defaultdict(Series)
        self.timeline = WorkerTimeline()
        self.marks: list[Mark] = []
        self.left_out = 0
        self.step = 0
        self._savers: dict[str, bool] = {}
        self._speeds: dict[str, float] = {}
        self._reader = EventReader(self._paths.events)
        self._saved_offset = 0
        self._identity: tuple[int, int] | None = None

    @property
    def size_bytes(self) -> int:
        """About the memory that it takes."""
        return 40 * sum(map(len, list(self.series.values()))) + (1 << 16)  # another thread may add a series now

    @property
    def started_t(self) -> float | None:
        return self.marks[0]["t"] if self.marks else None

    @property
    def offset(self) -> int:
        return self._reader.offset

    def catch_up(self) -> None:
        """Read what the stream has now. A stream that was replaced or cut is read from its beginning."""
        found = _identity(self._paths.events)
        is_other = found is None or (self._identity is not None and found != self._identity)
        if is_other or (found is not None and size_of_content(self._paths.events) < self._reader.offset):
            self._start_again()
        self._identity = found
        for event in self._reader.read_new():
            fold = _FOLDS.get(event.kind)
            if fold:
                fold(self, event)
            if event.kind in MARKED_KINDS:
                self._mark(event)
        if self._reader.offset - self._saved_offset >= MIN_NEW_BYTES:
            self.save()

    def fold_step(self, event: Event) -> None:
        fields, who, t, series = event.fields, event.who, event.t, self.series
        self.timeline.add(who, t, fields)
        wall_s = fields.get("wall_s", 0.0)
        if wall_s > 0:
            self._speeds[who] = fields.get("samples", 0) / wall_s
        if not self._savers.get(who, True):
            return
        self.step = step = event.step or 0
        for name in ("loss", "lr"):
            value = fields.get(name)
            if value is not None:
                series[name].add(step, t, value)
        if wall_s > 0:
            series["samples/s"].add(step, t, sum(self._speeds.values()))
            if EXPECTED in series:
                series[MEASURED].add(step, t, wall_s / max(fields.get("steps", 1), 1))

    def fold_plan(self, event: Event) -> None:
        self.series[EXPECTED].add(event.step or 0, event.t, event["prediction"]["step_s"])

    def fold_replan(self, event: Event) -> None:
        self.series[EXPECTED].add(self.step, event.t, event["expected"]["step_s"])

    def fold_joined(self, event: Event) -> None:
        self._savers[event.who] = bool(event.get("saves", True))

    def fold_view(self, event: Event) -> None:
        carries = event.get("carries", {})
        self._speeds = {who: speed for who, speed in self._speeds.items() if who in carries}

    def fold_departure(self, event: Event) -> None:
        self._speeds.pop(event.get("worker", event.who), None)

    def fold_evaluated(self, event: Event) -> None:
        for who in self._speeds or ():  # they evaluate together
            self.timeline.add(who, event.t, {"evaluation_s": event.get("evaluation_s", 0.0)})
        for name, value in event["metrics"].items():
            self.series[f"{event['split']}/{name}"].add(event.step or 0, event.t, value)

    def _mark(self, event: Event) -> None:
        who = event.get("worker") or event.get("server") or event.who
        carries = {name: list(lanes) for name, lanes in event.get("carries", {}).items()}
        step = self.step if event.step is None else event.step
        self.marks.append({"t": event.t, "step": step, "kind": event.kind, "who": who, "carries": carries})
        if len(self.marks) > MAX_MARKS:  # the first stays: times are counted from it
            saved = next((n for n, mark in enumerate(self.marks) if n and mark["kind"] == "saved"), 1)
            del self.marks[saved]  # saves are the most frequent and the least missed
            self.left_out += 1

    # ---- the file ----

    @property
    def _file(self) -> Path:
        return self._paths.history

    def save(self) -> None:
        """Write the file. A directory that cannot be written is not an error."""
        self._saved_offset = self._reader.offset
        if not self._has_room():
            return
        temporary = self._file.with_name(f"{self._file.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        with contextlib.suppress(OSError):
            with open_content(self._paths.events) as stream:
                header = self._header(stream_sample(stream, self._reader.offset))
            first = json.dumps(header, separators=(",", ":")).encode()
            try:
                with temporary.open("wb") as file:
                    file.write(b"%s %s\n" % (content_digest(first).encode(), first))
                    for column in self._columns():
                        column.tofile(file)
                temporary.replace(self._file)
            finally:
                temporary.unlink(missing_ok=True)

    def _has_room(self) -> bool:
        with contextlib.suppress(OSError):
            disk = os.statvfs(self._paths.root)
            return disk.f_bavail * disk.f_frsize > self.size_bytes + MIN_FREE_BYTES
        return False

    def _columns(self) -> Iterator[array[Any]]:
        for series in self.series.values():
            yield from series.columns

    def _header(self, sample: str) -> HistoryHeader:
        return {
            "version": VERSION,
            "offset": self._reader.offset,
            "sample": sample,
            "content": _digest_of(self._columns()),
            "series": {name: {"points": len(one), "start_t": one.start_t} for name, one in self.series.items()},
            "timeline": self.timeline.to_fields(),
            "marks": self.marks,
            "left_out": self.left_out,
            "savers": self._savers,
            "speeds": self._speeds,
            "step": self.step,
        }

    def _load(self) -> None:
        with contextlib.suppress(OSError), self._file.open("rb") as file, open_content(self._paths.events) as stream:
            header = _read_header(file)
            if header is None or header["sample"] != stream_sample(stream, header["offset"]):
                return
            with contextlib.suppress(EOFError, ValueError):
                series = {name: _read_series(file, fields) for name, fields in header["series"].items()}
                columns = (column for one in series.values() for column in one.columns)
                if _digest_of(columns) == header["content"] and all(one.is_valid() for one in series.values()):
                    self._take(header, series)

    def _take(self, header: HistoryHeader, series: dict[str, Series]) -> None:
        self.timeline = WorkerTimeline.from_fields(header["timeline"])
        self.series = defaultdict(Series, series)
        self.marks, self.left_out = header["marks"], header["left_out"]
        self._savers, self._speeds, self.step = header["savers"], header["speeds"], header["step"]
        self._reader = EventReader(self._paths.events, offset=header["offset"])
        self._saved_offset = header["offset"]
        self._identity = _identity(self._paths.events)


def _digest_of(columns: Iterable[array[Any]]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for column in columns:
        found.update(column)
    return found.hexdigest()


def _read_series(file: BinaryIO, fields: SeriesFields) -> Series:
    """EOFError if the file is too short."""
    series = Series()
    series.start_t = fields["start_t"]
    for column in series.columns:
        column.fromfile(file, fields["points"])
    return series


_FOLDS: dict[str, Callable[[RunHistory, Event], None]] = {
    "step": RunHistory.fold_step,
    "joined": RunHistory.fold_joined,
    "view": RunHistory.fold_view,
    "left": RunHistory.fold_departure,
    "worker_died": RunHistory.fold_departure,
    "evaluated": RunHistory.fold_evaluated,
    "plan": RunHistory.fold_plan,
    "replan": RunHistory.fold_replan,
}


def _identity(events: Path) -> tuple[int, int] | None:
    try:
        found = stat_content(events)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _read_header(file: BinaryIO) -> HistoryHeader | None:
    digest, _, content = file.readline(MAX_HEADER_BYTES).rstrip(b"\n").partition(b" ")
    if digest != content_digest(content).encode():
        return None
    try:
        header = json.loads(content)
    except (ValueError, RecursionError):
        return None
    believed = _is_header(header) and header["version"] == VERSION
    size = 20 * sum(one["points"] for one in header["series"].values()) if believed else 0
    if not believed or size != os.fstat(file.fileno()).st_size - file.tell():
        return None
    return header if _known_times(header["timeline"]) else None


def _known_times(timeline: TimelineFields) -> bool:
    return timeline["width_s"] > 0 and all(
        name in TIME_FIELDS for kinds in timeline["workers"].values() for name in kinds
    )
