"""`shoal profile RUN`: ask the workers of a live run for a profile of some steps, and merge what they write."""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import json
import os
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from shoal.errors import error
from shoal.events import RunState, RunStateReader
from shoal.fleet.profile_request import MAX_PROFILED_STEPS, ProfileRequest
from shoal.jobs import commands, run_dir
from shoal.jobs.inspection.trace_merge import merge_traces, operator_times
from shoal.spec.base import Spec
from shoal.spec.private_file import open_lock_file
from shoal.spec.run_paths import RunPaths, write_atomically

LEAD_S = 2.0
"""The first step lies so far ahead that every worker sees the request before: steps are reported in groups."""
MAX_PART_BYTES = 200 << 20
MAX_WAIT_S = 600.0
LATE_S = 20.0
"""Seconds after the last step in which the other workers may still write."""
POLL_S = 0.05
_NAME = re.compile(r"[0-9a-f-]{1,40}")


class OperatorRow(Spec):
    name: str
    calls: int
    total_us: float
    self_us: float


class ProfileSummary(Spec):
    """A finished profile. `missing`: workers that trained and wrote nothing, with the reason."""

    name: str
    t: float
    first_step: int
    steps: int
    workers: list[str]
    missing: dict[str, str] = Field(default_factory=dict)
    size_bytes: int
    operators: list[OperatorRow]


def trace_file(paths: RunPaths, name: str) -> Path:
    """The merged trace. SH678 if there is none of this name."""
    path = paths.profiles / f"{name}.trace.json.gz"
    if not _NAME.fullmatch(name) or path.is_symlink() or not path.is_file():
        raise error("SH678", f"'{paths.name}' has no profile '{name[:50]}'", where=str(paths.root))
    return path


def list_profiles(paths: RunPaths) -> list[ProfileSummary]:
    """The newest first. Files that are no summaries are left out."""
    found = [_read_summary(path) for path in paths.profiles.glob("*.summary.json")]
    return sorted((one for one in found if one is not None), key=lambda one: -one.t)


def _read_summary(path: Path) -> ProfileSummary | None:
    try:
        if path.is_symlink() or path.stat().st_size > MAX_PART_BYTES:
            return None
        return ProfileSummary.model_validate(json.loads(path.read_bytes()))
    except (OSError, ValueError, ValidationError, RecursionError):
        return None


def profile_run(paths: RunPaths, *, steps: int, stopping: Callable[[], bool] = lambda: False) -> ProfileSummary:
    """Profile the next steps, and wait for it. SH612 if no driver runs the run; SH602 if it is being
    profiled; SH679 if no worker wrote a profile."""
    if not 1 <= steps <= MAX_PROFILED_STEPS:
        raise error("SH609", f"{steps} steps", where="--steps", fix=f"Ask for 1 to {MAX_PROFILED_STEPS}.")
    if paths.folds:
        raise error("SH614", f"'{paths.name}' has folds", fix=f"Name one of them, such as {paths.name}/fold-0.")
    reader = RunStateReader(paths.events, paths.state_snapshot)
    with run_dir.readable(paths):
        state = reader.catch_up()
    if not run_dir.is_driven(paths.parent_run) or not state.training_workers:
        raise error("SH612", f"no worker of '{paths.name}' trains now", where=str(paths.root))
    first = state.step + max(2, int(LEAD_S * state.facts.get("steps_per_s", 0.0)))
    request = ProfileRequest(name=f"{int(time.time()):x}-{secrets.token_hex(4)}", first_step=first, steps=steps)
    directory = paths.profiles / request.name
    paths.profiles.mkdir(exist_ok=True)
    with _alone(paths):
        directory.mkdir()
        try:
            write_atomically(paths.profile_request, request.model_dump_json())
            commands.inspect(paths, request)
            _wait(paths, request, reader, stopping)
            return _merge(paths, request, reader.catch_up())
        finally:
            shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _alone(paths: RunPaths) -> Iterator[None]:
    """SH602 if the run is being profiled: one request would replace the other."""
    with open_lock_file(paths.profiles / ".lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message, fix = f"'{paths.name}' is being profiled", "Wait for that profile."
            raise error("SH602", message, where=str(paths.root), fix=fix) from None
        yield


def _wait(paths: RunPaths, request: ProfileRequest, reader: RunStateReader, stopping: Callable[[], bool]) -> None:
    """Until every worker that trains has written, the run has ended, or the last step was long ago."""
    until, late = time.monotonic() + MAX_WAIT_S, None
    while time.monotonic() < until and not stopping():
        state = reader.catch_up()
        names = {one.name for one in state.training_workers}
        if names <= _parts(paths, request).keys() or not run_dir.is_driven(paths.parent_run):
            return
        if state.step >= request.end:
            late = late or time.monotonic()
            if time.monotonic() - late > LATE_S:
                return
        time.sleep(POLL_S)


def _parts(paths: RunPaths, request: ProfileRequest) -> dict[str, Path]:
    directory = paths.profiles / request.name
    files = (path for kind in (".json", ".json.gz") for path in directory.glob(f"worker-*{kind}"))
    return {path.name.partition(".")[0]: path for path in sorted(files) if not path.is_symlink()}


def _merge(paths: RunPaths, request: ProfileRequest, state: RunState) -> ProfileSummary:
    traces: dict[str, dict[str, Any]] = {}
    missing = {one.name: "it wrote nothing in time" for one in state.training_workers}
    for who, path in _parts(paths, request).items():
        missing.pop(who, None)
        try:
            traces[who] = _read_trace(path)
        except (OSError, EOFError, ValueError, RecursionError, zlib.error) as failure:
            missing[who] = f"its trace cannot be read: {failure}"
    if not traces:
        told = "; ".join(f"{who}: {why}" for who, why in missing.items()) or "the run ended first"
        raise error("SH679", told, where=str(paths.root))
    return _write(paths, request, traces, missing)


def _read_trace(path: Path) -> dict[str, Any]:
    """ValueError if it is too large, or no trace."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        content = file.read(MAX_PART_BYTES + 1)
    if len(content) > MAX_PART_BYTES:
        raise ValueError(f"it is larger than {MAX_PART_BYTES >> 20} MB: profile fewer steps")
    found = json.loads(content)
    if not isinstance(found, dict):
        raise ValueError("it is not a trace")
    return found


def _write(
    paths: RunPaths, request: ProfileRequest, traces: dict[str, dict[str, Any]], missing: dict[str, str]
) -> ProfileSummary:
    merged = merge_traces(traces)
    content = gzip.compress(json.dumps(merged, separators=(",", ":")).encode(), 6)
    target = paths.profiles / f"{request.name}.trace.json.gz"
    part = target.with_suffix(".tmp")
    part.write_bytes(content)
    os.replace(part, target)
    summary = ProfileSummary(
        name=request.name,
        t=time.time(),
        first_step=request.first_step,
        steps=request.steps,
        workers=list(traces),
        missing=missing,
        size_bytes=len(content),
        operators=[OperatorRow(**asdict(one)) for one in operator_times(merged["traceEvents"])],
    )
    write_atomically(paths.profiles / f"{request.name}.summary.json", summary.model_dump_json())
    return summary
