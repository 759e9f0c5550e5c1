"""The background half of a save: hash, write new blobs, write the manifest, delete old checkpoints."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal.checkpoint.blobs import Blob, pack_tensors
from shoal.checkpoint.files import CheckpointFiles, is_temp
from shoal.checkpoint.manifest import (
    Manifest,
    blob_path,
    manifest_path,
    read_manifest,
    step_from_path,
    steps_in,
    steps_to_delete,
)
from shoal.checkpoint.snapshot import Snapshot
from shoal.errors import CheckpointError, ShoalError, from_os_error


@dataclass(frozen=True)
class SaveResult:
    """The outcome of a save. `reason`: why it failed. `limit`: the error for a full disk or an exhausted limit of the
    operating system. `cleanup_error`: why old files could not be removed."""

    step: int
    metric: float | None
    size_bytes: int = 0
    written_bytes: int = 0
    stall_s: float = 0.0
    write_s: float = 0.0
    cpu_s: float = 0.0
    reason: str = ""
    limit: ShoalError | None = None
    cleanup_error: str = ""


@dataclass(frozen=True)
class RetentionPolicy:
    """How many of the newest and of the best checkpoints are kept."""

    keep: int
    keep_best: int
    metric_sign: int


class CheckpointWriter:
    """Writes the checkpoints of one name. Called by one thread at a time."""

    def __init__(
        self, files: CheckpointFiles, directory: str, *, job_sha256: str | None, retention: RetentionPolicy
    ) -> None:
        self._files = files
        self._directory = directory
        self._job_sha256 = job_sha256
        self._retention = retention
        self._verified: set[str] = set()
        self._needs_sweep = True
        self.damaged: set[int] = set()
        """Steps that cannot be loaded. They do not count as kept, and the next successful save deletes them."""

    def write(self, snapshot: Snapshot, *, on_written: Callable[[], None] = lambda: None) -> SaveResult:
        """Never raises: a failure is part of the result, and training goes on. Calls `on_written` when all files are
        written or the save has failed."""
        begun_s, begun_cpu_s = time.perf_counter(), time.thread_time()
        result = SaveResult(snapshot.step, snapshot.metric)
        try:
            result = self._write(snapshot, result)
        except Exception as problem:
            result = failed_save(result, problem)
            self._needs_sweep = True
        on_written()
        try:
            self._clean_up(snapshot.step, saved=not result.reason)
        except Exception as problem:
            result = replace(result, cleanup_error=failed_save(result, problem).reason)
        took_s, took_cpu_s = time.perf_counter() - begun_s, time.thread_time() - begun_cpu_s
        return replace(result, write_s=took_s, cpu_s=took_cpu_s)

    def _write(self, snapshot: Snapshot, result: SaveResult) -> SaveResult:
        blobs, refs = pack_tensors(snapshot.tensors)
        manifest = Manifest(
            step=snapshot.step,
            created=time.time(),
            job_sha256=self._job_sha256,
            metric=snapshot.metric,
            tree=snapshot.tree,
            blobs={digest: blob.size_bytes for digest, blob in blobs.items()} | dict(snapshot.external_blobs),
            tensors=refs,
            info=snapshot.info,
        )
        raw = manifest.dump()
        with self._files.save_lock():
            present = self._files.sizes("blobs")
            new = [blob for blob in blobs.values() if not self._is_stored(blob, present)]
            for blob in new:
                self._files.write(blob_path(blob.digest), blob.chunks)
            self._files.write(manifest_path(self._directory, snapshot.step), [raw])
        self._verified |= blobs.keys()
        written = sum(blob.size_bytes for blob in new) + sum(snapshot.external_blobs.values()) + len(raw)
        return replace(result, size_bytes=manifest.size_bytes, written_bytes=written)

    def _is_stored(self, blob: Blob, present: dict[str, int]) -> bool:
        """Whether an intact copy of the blob is stored. A blob that this process has not verified yet is read once.

        In storage without locks the blob is written again instead: a new file is safe from sweeps by other processes.
        """
        path = blob_path(blob.digest)
        if present.get(path) != blob.size_bytes:
            return False
        return blob.digest in self._verified or (self._files.has_locks and self._verify(path, blob.digest))

    def _verify(self, path: str, digest: str) -> bool:
        try:
            with self._files.open(path) as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == digest  # type: ignore[arg-type]
        except OSError:
            return False

    def _clean_up(self, step: int, *, saved: bool) -> None:
        if saved:
            self._delete_old(step)
        if self._needs_sweep:
            self._needs_sweep = not sweep_blobs(self._files)

    def _delete_old(self, step: int) -> None:
        """Delete the manifests that retention does not keep. The one just written is always kept."""
        self.damaged.discard(step)
        manifests, broken = self._read_manifests()
        rule = self._retention
        metas = [(m.step, m.metric) for m in manifests.values()]
        drop = {*steps_to_delete(metas, rule.keep, rule.keep_best, rule.metric_sign), *broken} - {step}
        for old in drop:
            self._files.remove(manifest_path(self._directory, old))
        self._needs_sweep = self._needs_sweep or bool(drop)
        self.damaged.clear()
        # Only blobs that our own manifests refer to are safe from sweeps by other processes.
        self._verified &= {digest for old, m in manifests.items() if old not in drop for digest in m.blobs}

    def _read_manifests(self) -> tuple[dict[int, Manifest], set[int]]:
        """Our manifests by step, and the steps whose checkpoints are known to be damaged."""
        sound: dict[int, Manifest] = {}
        broken = set()
        for step in steps_in(self._files, self._directory):
            try:
                manifest = read_manifest(self._files, manifest_path(self._directory, step))
            except CheckpointError as problem:
                broken |= {step} if problem.code == "SH502" else set()
            else:
                sound[step] = manifest
        broken |= self.damaged & sound.keys()
        return {step: m for step, m in sound.items() if step not in broken}, broken


def sweep_blobs(files: CheckpointFiles) -> bool:
    """Remove the blobs that no manifest of any name refers to, and the remains of crashed saves.

    False if something was left for next time, because a save is in progress or a file is too new.
    """
    with files.sweep_lock() as alone:
        if not alone:
            return False
        present = files.sizes()
        needed = _referenced_blobs(files, present)
        litter = [p for p in present if is_temp(p) or (p.startswith("blobs/") and p not in needed)]
        stale = [path for path in litter if files.is_stale(path)]
        for path in stale:
            files.remove(path)
        return len(stale) == len(litter)


def _referenced_blobs(files: CheckpointFiles, present: dict[str, int]) -> set[str]:
    """The blobs that manifests refer to. A damaged manifest refers to none; an unreadable one stops the sweep."""
    needed: set[str] = set()
    for path in present:
        if step_from_path(path) is None:
            continue
        try:
            needed |= {blob_path(digest) for digest in read_manifest(files, path).blobs}
        except CheckpointError as problem:
            if problem.code == "SH507" or isinstance(problem.__cause__, OSError):
                raise
    return needed


def failed_save(result: SaveResult, problem: Exception) -> SaveResult:
    """The result of a save that raised this."""
    reason = problem.message if isinstance(problem, ShoalError) else str(problem) or type(problem).__name__
    return replace(result, reason=reason, limit=_limit_error(problem, result.step))


def _limit_error(problem: Exception, step: int) -> ShoalError | None:
    cause = problem.__cause__ if isinstance(problem, ShoalError) and isinstance(problem.__cause__, OSError) else problem
    return from_os_error(cause, doing=f"step {step}")
