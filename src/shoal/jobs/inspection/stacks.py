"""`shoal stacks RUN`: where every thread of every worker and server is now."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ShoalError, error
from shoal.events import RunState, load_state
from shoal.events.state_parts import WorkerSummary
from shoal.fleet.orphans import Orphan, find_orphans
from shoal.fleet.stack_dumps import STACK_SIGNAL, answers_stack_requests, is_frozen
from shoal.jobs import commands, run_dir
from shoal.spec.run_paths import RunPaths

ANSWER_TIMEOUT_S = 5.0
QUIET_S = 0.1
"""A dump is complete when its file has not grown for so long: it is written by one handler, without a pause."""
POLL_S = 0.01
MAX_DUMP_BYTES = 1 << 20
_UNWRITABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class ProcessStacks:
    """The stacks of one process, most recent call first. `problem` says why there are none; else ''."""

    who: str
    pid: int
    host: str
    text: str = ""
    problem: str = ""


def collect_stacks(paths: RunPaths) -> list[ProcessStacks]:
    """The stacks of all live processes of the run. SH612 if none lives."""
    one_each = [found for fold in paths.folds or [paths] for found in _collect(fold, prefix=bool(paths.folds))]
    if not one_each:
        raise error("SH612", f"no process of '{paths.name}' lives", where=str(paths.root))
    return one_each


def _collect(paths: RunPaths, *, prefix: bool) -> list[ProcessStacks]:
    with run_dir.readable(paths):
        state = load_state(paths.events, paths.state_snapshot)
    here, host = find_orphans(paths), socket.gethostname()
    asked = {one.seat.name: _ask(paths, one) for one in here if _is_of_this_machine(one, state, host)}
    found = [_answer(paths, one, asked.get(one.seat.name), host) for one in here]
    known = {one.seat.name for one in here}
    found += _ask_driver(paths, [one for one in state.training_workers if one.name not in known])
    name = f"{paths.name}/" if prefix else ""
    return [ProcessStacks(f"{name}{one.who}", one.pid, one.host, one.text, one.problem) for one in found]


def _ask_driver(paths: RunPaths, elsewhere: list[WorkerSummary]) -> list[ProcessStacks]:
    """The stacks of workers without the run's directory: their answers come through the driver."""
    files = {one.name: paths.logs / f"{one.name}.stacks" for one in elsewhere}
    before = {who: _size(file) for who, file in files.items()}
    problem = ""
    try:
        if elsewhere:
            commands.inspect(paths)
    except ShoalError as failure:
        problem = f"it runs on another machine, and the driver cannot be asked: {failure.message}"
    texts = {who: "" if problem else _read_dump(file, before[who]) for who, file in files.items()}
    silent = problem or "it does not answer: it starts, ends, or holds the interpreter's lock"
    return [
        ProcessStacks(one.name, one.pid, one.host, texts[one.name], "" if texts[one.name] else silent)
        for one in elsewhere
    ]


def _is_of_this_machine(one: Orphan, state: RunState, host: str) -> bool:
    """A shared directory may have the locks of another machine's processes."""
    known: Mapping[str, object] = {**state.workers, **state.servers}
    return getattr(known.get(one.seat.name), "host", "") in ("", host)


def stacks_file(paths: RunPaths, one: Orphan) -> Path:
    return paths.stacks(one.seat.number, one.seat.role)


def _ask(paths: RunPaths, one: Orphan) -> int | None:
    """Send the signal. Returns where the answer will begin in the file; None if the process cannot be asked."""
    if not answers_stack_requests(one.pid):
        return None
    before = _size(stacks_file(paths, one))
    try:
        os.kill(one.pid, STACK_SIGNAL)
    except (ProcessLookupError, PermissionError):
        return None
    return before


def _answer(paths: RunPaths, one: Orphan, start: int | None, host: str) -> ProcessStacks:
    if start is None:
        return ProcessStacks(
            one.seat.name, one.pid, host, problem="it cannot be asked: it starts, ends, or is not here"
        )
    text = _read_dump(stacks_file(paths, one), start)
    if text:
        return ProcessStacks(one.seat.name, one.pid, host, text)
    why = "it is stopped (SIGSTOP): it answers when it goes on" if is_frozen(one.pid) else "it does not answer"
    return ProcessStacks(one.seat.name, one.pid, host, problem=why)


def _read_dump(path: Path, start: int) -> str:
    """The bytes after `start`, when no more come; '' if none come in time."""
    until = time.monotonic() + ANSWER_TIMEOUT_S
    seen, since = start, time.monotonic()
    while time.monotonic() < until:
        size = _size(path)
        if size != seen:
            seen, since = size, time.monotonic()
        elif seen > start and time.monotonic() - since >= QUIET_S:
            break
        time.sleep(POLL_S)
    try:
        with path.open("rb") as file:
            file.seek(start)
            return _UNWRITABLE.sub("?", file.read(min(seen - start, MAX_DUMP_BYTES)).decode(errors="replace")).strip()
    except OSError:
        return ""


def _size(path: Path) -> int:
    try:
        return path.stat(follow_symlinks=False).st_size
    except OSError:
        return 0
