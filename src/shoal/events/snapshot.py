"""A snapshot of a run's state beside its stream, so that a reader folds only newer events.

The stream is the truth; a snapshot only saves work. It is checked before use: its own digest, its version, the type of
every value, and that it belongs to this stream. An invalid snapshot is ignored and replaced.

Two lines of JSON: a header with the summary that `shoal runs` shows, which can be read without the rest, and the state.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

from shoal.events.checks import Count, Number, make_check
from shoal.events.event import Event
from shoal.events.packed_file import content_size, open_content, size_of_content, stat_content
from shoal.events.run_state import FOLD_VERSION, RunState
from shoal.events.schema import KINDS, SCHEMA_VERSION, from_row, to_row
from shoal.events.state_parts import Curve, LostResidual, Pace, ServerSummary, WorkerSummary
from shoal.events.stream import MAX_LINE_BYTES, EventReader

MAX_SNAPSHOT_BYTES = 1 << 26
SAVE_EVERY_S = 30.0
"""Seconds between two snapshots that a driver writes during its run."""
MIN_NEW_BYTES = 1 << 18
"""Bytes that a reader must have folded before it writes a snapshot of a growing stream."""
IDLE_S = 5.0
"""Seconds without growth after which a stream counts as idle."""
SNAPSHOT_VERSION = [SCHEMA_VERSION, FOLD_VERSION]
_SAMPLE_BYTES = 512
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class RunSummary:
    """The fields of a run that a list of runs shows."""

    status: str
    step: int
    steps_total: int
    metrics: dict[str, Number]
    started_t: float | None
    weights_sha256: str
    skipped_rows: int

    @classmethod
    def of(cls, state: RunState) -> RunSummary:
        weights = str(state.result.get("weights_sha256", ""))
        shown = state.status, state.step, state.steps_total, dict(state.metrics), state.started_t
        return cls(*shown, weights_sha256=weights, skipped_rows=state.skipped_rows)


class SnapshotHeader(TypedDict):
    """`offset`: the end of the folded part of the stream. `size`: the size of the stream that is covered, which
    includes an incomplete line after `offset`."""

    version: list[Count]
    offset: Count
    size: Count
    sample: str
    state: str
    summary: dict[str, Any]


_EVENTS_IN_STATE = {"layout": "layout", "plan": "plan", "result": "finished", "error": "failed"}
"""Fields of the state that hold the fields of an event of a kind."""

_is_header, _is_summary, _is_state = make_check(SnapshotHeader), make_check(RunSummary), make_check(RunState)


def load_summary(events: Path, snapshot: Path) -> RunSummary | None:
    """The summary in the snapshot; None unless the snapshot covers the whole stream."""
    with contextlib.suppress(OSError), snapshot.open("rb") as file, open_content(events) as stream:
        header = _read_header(file)
        size = content_size(stream)
        if (
            header is not None
            and header["size"] == size
            and header["sample"] == stream_sample(stream, header["offset"])
        ):
            return RunSummary(**header["summary"])
    return None


class RunStateReader:
    """Follows a stream and folds it into `state`, starting from the snapshot if there is one. Never blocks.

    Belongs to one thread. `state` stays the same object.
    """

    def __init__(self, events: Path, snapshot: Path) -> None:
        self._events, self._snapshot = events, snapshot
        self.state, offset, self._saved_size = _load(events, snapshot) or (RunState(), 0, 0)
        self._reader = EventReader(events, offset=offset)
        self._skipped_before = self.state.skipped_rows
        self._saved_at_s = time.monotonic()

    def read_new(self) -> Iterator[Event]:
        """The events since the last call; each is applied to `state` before it is yielded."""
        for event in self._reader.read_new():
            self.state.apply(event)
            yield event
        self.state.skipped_rows = self._skipped_before + self._reader.skipped_rows

    def catch_up(self) -> RunState:
        """Fold everything that is in the stream now."""
        for _ in self.read_new():
            pass
        return self.state

    def save_if_due(self) -> None:
        """Save if `SAVE_EVERY_S` have passed. The driver calls it at every tick."""
        if time.monotonic() >= self._saved_at_s + SAVE_EVERY_S:
            self.save()

    def save_if_useful(self) -> None:
        """Save if that spares the next reader much work."""
        with contextlib.suppress(OSError):
            is_idle = time.time() - stat_content(self._events).st_mtime > IDLE_S
            if size_of_content(self._events) - self._saved_size >= MIN_NEW_BYTES or is_idle:
                self.save()

    def save(self) -> None:
        """Write a snapshot, unless the stream has not changed. A read-only directory is not an error."""
        self._saved_at_s = time.monotonic()
        with contextlib.suppress(OSError):
            if size_of_content(self._events) != self._saved_size:
                self._saved_size = _write(self._snapshot, self._events, self._reader.offset, self.state)


def load_state(events: Path, snapshot: Path) -> RunState:
    """The present state of a run."""
    reader = RunStateReader(events, snapshot)
    state = reader.catch_up()
    reader.save_if_useful()
    return state


# ---- the file ----


def _write(snapshot: Path, events: Path, offset: int, state: RunState) -> int:
    """Returns the size of the stream that the snapshot covers."""
    content = encode_state(state)
    with open_content(events) as stream:
        header: SnapshotHeader = {
            "version": SNAPSHOT_VERSION,
            "offset": offset,
            "size": _covered_size(stream, offset),
            "sample": stream_sample(stream, offset),
            "state": content_digest(content),
            "summary": asdict(RunSummary.of(state)),
        }
    first = json.dumps(header, separators=(",", ":")).encode()
    temporary = snapshot.with_name(f"{snapshot.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        temporary.write_bytes(b"%s %s\n%s\n" % (content_digest(first).encode(), first, content))
        temporary.replace(snapshot)
    finally:
        temporary.unlink(missing_ok=True)
    return header["size"]


def _covered_size(stream: BinaryIO, offset: int) -> int:
    """An incomplete line after the offset is covered too; complete lines that were appended meanwhile are not."""
    stream.seek(offset)
    rest = stream.read(MAX_LINE_BYTES)
    return offset if b"\n" in rest or len(rest) == MAX_LINE_BYTES else offset + len(rest)


def _load(events: Path, snapshot: Path) -> tuple[RunState, int, int] | None:
    """The state in the snapshot, its offset and size; None if the snapshot is invalid."""
    with contextlib.suppress(OSError), snapshot.open("rb") as file, open_content(events) as stream:
        header = _read_header(file)
        if header is None or header["sample"] != stream_sample(stream, header["offset"]):
            return None
        content = file.read(MAX_SNAPSHOT_BYTES).removesuffix(b"\n")
        state = decode_state(content) if content_digest(content) == header["state"] else None
        return (state, header["offset"], header["size"]) if state is not None else None
    return None


def _read_header(file: BinaryIO) -> SnapshotHeader | None:
    digest, _, content = file.readline(MAX_SNAPSHOT_BYTES).rstrip(b"\n").partition(b" ")
    if digest != content_digest(content).encode():
        return None
    header: SnapshotHeader = _parse(content)
    believed = _is_header(header) and header["version"] == SNAPSHOT_VERSION and _is_summary(header["summary"])
    return header if believed else None


def stream_sample(stream: BinaryIO, offset: int) -> str:
    """A digest of the stream's beginning and of the end of the folded part. '' if the stream is shorter than
    `offset`."""
    start = max(offset - _SAMPLE_BYTES, 0)
    if start > content_size(stream):
        return ""  # no file system seeks to any number
    stream.seek(0)
    first = stream.read(min(_SAMPLE_BYTES, offset))
    stream.seek(start)
    last = stream.read(offset - start)
    return content_digest(first + last) if len(last) == offset - start else ""


def content_digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()


def _parse(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


# ---- the state as JSON ----


def encode_state(state: RunState) -> bytes:
    """The state as JSON. `dataclasses.asdict` would copy every point of every curve."""
    parts = {
        "workers": {name: vars(one) for name, one in state.workers.items()},
        "servers": {name: vars(one) for name, one in state.servers.items()},
        "curves": {name: vars(one) for name, one in state.curves.items()},
        "lost_residuals": [vars(one) for one in state.lost_residuals],
        "pace": vars(state.pace),
        "notes": [to_row(one) for one in state.notes],
    }
    return json.dumps(vars(state) | parts, separators=(",", ":")).encode()


def _holds_events(state: dict[str, Any]) -> bool:
    """Whether the parts of a state that are fields of an event fit the schema, and curves have a value for each
    step."""
    whole = ((kind, state[name]) for name, kind in _EVENTS_IN_STATE.items())
    rows = [(kind, row) for kind, row in whole if row] + [("replan", row) for row in state["replans"]]
    return all(KINDS[kind].accepts(row) for kind, row in rows) and all(
        len(one["steps"]) == len(one["values"]) for one in state["curves"].values()
    )


def decode_state(content: bytes) -> RunState | None:
    """The state; None if the content was not written by `encode_state` of this version."""
    found = _parse(content)
    if not isinstance(found, dict) or not isinstance(found.get("notes"), list):
        return None
    notes = [from_row(row) for row in found["notes"]]
    if not _is_state(found | {"notes": []}) or None in notes or not _holds_events(found):
        return None
    parts = {
        "workers": {name: WorkerSummary(**one) for name, one in found["workers"].items()},
        "servers": {name: ServerSummary(**one) for name, one in found["servers"].items()},
        "curves": {name: Curve(**one) for name, one in found["curves"].items()},
        "lost_residuals": [LostResidual(**one) for one in found["lost_residuals"]],
        "pace": Pace(**found["pace"]),
        "notes": notes,
    }
    return RunState(**found | parts)
