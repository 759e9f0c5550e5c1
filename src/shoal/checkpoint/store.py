"""The checkpoint store: decides when to save, saves in the background, and loads the newest intact state."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Protocol

from shoal.checkpoint.files import CheckpointFiles, open_files
from shoal.checkpoint.manifest import Manifest, manifest_directory, manifest_path, read_manifest, steps_in
from shoal.checkpoint.reader import missing_blob_reason, read_state
from shoal.checkpoint.save_policy import SaveInterval, SaveTiming, decide_save
from shoal.checkpoint.snapshot import HostBuffers, Snapshot
from shoal.checkpoint.state_tree import State, flatten
from shoal.checkpoint.writer import CheckpointWriter, RetentionPolicy, SaveResult, failed_save
from shoal.errors import CheckpointError, ShoalError, error


class EmitEvent(Protocol):
    """Receives the events of the store, always on the thread that calls the store."""

    def __call__(self, kind: str, /, **fields: Any) -> object: ...


def _no_emit(kind: str, /, **fields: Any) -> None:
    """Discard the event."""


class CheckpointStore:
    """The checkpoints of one run at a local path, an fsspec URL, or in other files. Used by one thread.

    Several stores, in this or other processes, may share a path and its blobs under different names. A save blocks
    training only for a copy in memory; one background thread does the rest, one save at a time. A failed save leaves
    the older checkpoints unchanged and emits `save_failed`; only `wait` raises it.

    Events: `saved`, `save_failed`, `save_skipped`, `checkpoint_invalid`, `cleanup_failed`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | CheckpointFiles,
        *,
        job_sha256: str | None,
        every: SaveInterval = ("auto", 0),
        keep: int = 2,
        keep_best: int = 1,
        metric_sign: int = -1,
        emit: EmitEvent = _no_emit,
        name: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = open_files(path) if isinstance(path, str | os.PathLike) else path
        self._directory = manifest_directory(name)
        self._job_sha256 = job_sha256
        self._every = every
        self._emit = emit
        self._clock = clock
        retention = RetentionPolicy(keep=keep, keep_best=keep_best, metric_sign=metric_sign)
        self._writer = CheckpointWriter(self._files, self._directory, job_sha256=job_sha256, retention=retention)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-save")
        self._buffers = HostBuffers()
        self._pending: Future[SaveResult] | None = None
        self._last_saved: tuple[int, float | None] | None = None
        self._failure: ShoalError | None = None
        self._begun_s: float | None = None
        self._last_save_s = 0.0
        self._last_save_step = 0
        self._last_cost_s: float | None = None
        self._total_cost_s = 0.0

    @property
    def files(self) -> CheckpointFiles:
        """The storage, for callers that write or read parts of a checkpoint directly."""
        return self._files

    # ---- saving ----

    def maybe_save(
        self,
        step: int,
        state_fn: Callable[[], State],
        *,
        metric: float | None = None,
        info: Mapping[str, Any] | None = None,
        force: bool = False,
        external_blobs: Callable[[], Mapping[str, int]] | None = None,
    ) -> bool:
        """Call after every step. Saves if a save is due, or if `force` is set (even if `every` is "never").

        Returns whether a save was started. A step is not saved twice, unless its metric has become known since.
        `external_blobs` returns the blobs, with their sizes, that other processes wrote to this store for this state:
        they belong to the checkpoint.
        """
        self._collect_result()
        now_s = self._start_clock(step)
        if self._last_saved is not None and self._last_saved[0] == step and metric in (None, self._last_saved[1]):
            return False
        if not force and not self._is_due(step, now_s):
            return False
        self._save(step, state_fn, metric=metric, info=info, external_blobs=external_blobs)
        return True

    def is_due(self, step: int) -> bool:
        """Whether a save of this step is due. For workers that save together and decide together."""
        self._collect_result()
        return self._is_due(step, self._start_clock(step))

    def save_sharded(
        self,
        step: int,
        state_fn: Callable[[], State],
        *,
        metric: float | None,
        external_blobs: Callable[[], Mapping[str, int]],
    ) -> None:
        """Start a save to which other ranks contribute blobs (see `maybe_save`), after the one in progress."""
        self._start_clock(step)
        self._save(step, state_fn, metric=metric, info=None, external_blobs=external_blobs)

    def _is_due(self, step: int, now_s: float) -> bool:
        decision = decide_save(self._every, self._timing(step, now_s))
        if decision == "skip":
            self._emit("save_skipped", step=step)
            self._last_save_step, self._last_save_s = step, now_s
        return decision == "save"

    def save(
        self, step: int, state: State, *, metric: float | None = None, info: Mapping[str, Any] | None = None
    ) -> None:
        """Start a save now, after the one in progress. SH506 if the state holds something that cannot be saved."""
        self._start_clock(step)
        self._save(step, lambda: state, metric=metric, info=info)

    def wait(self) -> None:
        """Wait until nothing is being written. SH503 if the last save failed, SH510 if the disk is full, SH628 if the
        process has no descriptor left."""
        self._wait_for_save()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Finish the save in progress. The store can still load, but no longer save."""
        self._wait_for_save()
        self._thread.shutdown()

    def _save(
        self,
        step: int,
        state_fn: Callable[[], State],
        *,
        metric: float | None,
        info: Mapping[str, Any] | None,
        external_blobs: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        self._wait_for_save()
        begun_s = self._clock()
        self._last_save_step, self._last_save_s = step, begun_s
        plain_info = _json_copy(info)
        try:
            with ExitStack() as stack:
                if external_blobs is not None:  # no process may sweep blobs that have no manifest yet
                    stack.enter_context(self._files.save_lock())
                tensors, tree = flatten(state_fn())
                written_elsewhere = dict(external_blobs()) if external_blobs is not None else {}
                save_lock = stack.pop_all()
        except (OSError, CheckpointError) as problem:
            if isinstance(problem, CheckpointError) and problem.code != "SH503":
                raise
            self._record_result(failed_save(SaveResult(step, metric), problem))
            return
        self._last_saved = (step, metric)
        try:
            copies = self._buffers.fill(tensors)
        except (RuntimeError, MemoryError, OSError) as problem:
            save_lock.close()
            self._record_result(SaveResult(step, metric, reason=f"no memory for a copy of the state: {problem}"))
            return
        snapshot = Snapshot(step, metric, copies, tree, plain_info, written_elsewhere)
        stall_s = self._clock() - begun_s
        self._pending = self._thread.submit(_write_snapshot, self._writer, snapshot, stall_s, save_lock)

    def _start_clock(self, step: int) -> float:
        """The time now. The first call starts the clock of the interval."""
        now_s = self._clock()
        if self._begun_s is None:
            self._begun_s = self._last_save_s = now_s
            self._last_save_step = step - 1
        return now_s

    def _timing(self, step: int, now_s: float) -> SaveTiming:
        return SaveTiming(
            step=step,
            last_step=self._last_save_step,
            elapsed_s=now_s - (self._begun_s or 0.0),
            since_s=now_s - self._last_save_s,
            cost_s=self._last_cost_s,
            spent_s=self._total_cost_s,
            busy=self._pending is not None,
            failed=self._failure is not None,
        )

    def _wait_for_save(self) -> None:
        if self._pending is not None:
            self._pending.exception()
            self._collect_result()

    def _collect_result(self) -> None:
        if self._pending is not None and self._pending.done():
            pending, self._pending = self._pending, None
            self._record_result(pending.result())

    def _record_result(self, result: SaveResult) -> None:
        self._last_cost_s = result.stall_s + result.cpu_s
        self._total_cost_s += self._last_cost_s
        if result.reason:
            self._last_saved = None
            other = error("SH503", f"step {result.step}: {result.reason}", where=self._files.where)
            self._failure = result.limit or other
            self._emit("save_failed", step=result.step, reason=result.reason)
        else:
            recovered, self._failure = self._failure is not None, None
            self._emit(
                "saved",
                step=result.step,
                recovered=recovered,
                size_bytes=result.size_bytes,
                written_bytes=result.written_bytes,
                stall_s=result.stall_s,
                write_s=result.write_s,
            )
        if result.cleanup_error:
            self._emit("cleanup_failed", step=result.step, reason=result.cleanup_error)

    # ---- loading ----

    def latest(self) -> Manifest | None:
        """The newest checkpoint that looks intact: a valid manifest, and every blob has the right size."""
        return next(self.intact_manifests(), None)

    def intact_manifests(self) -> Iterator[Manifest]:
        """All checkpoints that look intact, newest first."""
        for step in self._steps():
            try:
                manifest = self._manifest(step)
                if reason := missing_blob_reason(self._files, manifest):
                    raise error("SH502", reason, where=self._files.where)
            except CheckpointError as problem:
                self._report_invalid(step, problem)
            else:
                yield manifest

    def mark_damaged(self, step: int, reason: str) -> None:
        """Record that a caller found the checkpoint damaged while reading it."""
        self._writer.damaged.add(step)
        self._emit("checkpoint_invalid", step=step, reason=reason)

    def load(self, step: int, *, section: str = "") -> tuple[Manifest, State]:
        """The state of a step, or one section of it (None if it has no such section).

        SH501 if there is no such checkpoint, SH502 if it is damaged, SH504 if it belongs to another job.
        """
        self._wait_for_save()
        manifest = self._manifest(step)
        if not section and (reason := missing_blob_reason(self._files, manifest)):
            raise error("SH502", reason, where=self._files.where)
        return manifest, read_state(self._files, manifest, section=section)

    def load_latest(self, *, section: str = "") -> tuple[Manifest, State] | None:
        """The newest checkpoint whose every bit verifies. Emits `checkpoint_invalid` for damaged ones and skips
        them."""
        for step in self._steps():
            try:
                return self.load(step, section=section)
            except CheckpointError as problem:
                self._report_invalid(step, problem)
        return None

    def _steps(self) -> list[int]:
        self._wait_for_save()
        try:
            return steps_in(self._files, self._directory)
        except OSError as problem:
            fix = "Check the path, the credentials and the network."
            raise error("SH501", f"cannot be listed: {problem}", where=self._files.where, fix=fix) from problem

    def _manifest(self, step: int) -> Manifest:
        path = manifest_path(self._directory, step)
        manifest = read_manifest(self._files, path)
        if self._job_sha256 is not None and manifest.job_sha256 != self._job_sha256:
            where = f"{self._files.where.rstrip('/')}/{path}"
            raise error("SH504", "it was written by another job, or the job was changed since", where=where)
        return manifest

    def _report_invalid(self, step: int, problem: CheckpointError) -> None:
        """Report a damaged checkpoint, so that the caller tries an older one. Other errors are raised."""
        if problem.code not in ("SH501", "SH502"):
            raise problem
        if not isinstance(problem.__cause__, OSError):  # a read error may be temporary
            self._writer.damaged.add(step)
        self._emit("checkpoint_invalid", step=step, reason=f"{problem.where}: {problem.message}")


def _write_snapshot(writer: CheckpointWriter, snapshot: Snapshot, stall_s: float, save_lock: ExitStack) -> SaveResult:
    return replace(writer.write(snapshot, on_written=save_lock.close), stall_s=stall_s)


def _json_copy(info: Mapping[str, Any] | None) -> dict[str, Any]:
    """A deep copy through JSON."""
    try:
        return dict(json.loads(json.dumps(dict(info or {}), allow_nan=False)))
    except (TypeError, ValueError) as problem:
        raise error("SH506", f"cannot be saved: {problem}", where="info") from None
