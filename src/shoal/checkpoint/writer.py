"""The background half of a save: hash, write what is new, name it all in a manifest, drop what is too old."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal.checkpoint.blobs import Blob, pack
from shoal.checkpoint.files import Files, is_temp
from shoal.checkpoint.manifest import (
    Manifest,
    blob_path,
    manifest_path,
    read_manifest,
    step_of,
    steps_in,
    to_drop,
)
from shoal.checkpoint.snapshot import Snapshot
from shoal.errors import CheckpointError


@dataclass(frozen=True)
class Outcome:
    """How a save went. `reason` says why it failed; `untidy`, why old files could not be removed."""

    step: int
    metric: float | None
    size_bytes: int = 0
    written_bytes: int = 0
    stall_s: float = 0.0
    write_s: float = 0.0
    cpu_s: float = 0.0
    reason: str = ""
    untidy: str = ""


@dataclass(frozen=True)
class Retention:
    """How many of the newest and of the best checkpoints stay."""

    keep: int
    keep_best: int
    sign: int


class Writer:
    """Writes the checkpoints of one name. Called by one thread at a time."""

    def __init__(self, files: Files, directory: str, *, job_sha256: str | None, retention: Retention) -> None:
        self._files = files
        self._directory = directory
        self._job_sha256 = job_sha256
        self._retention = retention
        self._sound: set[str] = set()
        self._littered = True
        self.damaged: set[int] = set()
        """Steps that cannot be loaded: they do not count as kept, and go with the next save that succeeds."""

    def write(self, snapshot: Snapshot, *, written: Callable[[], None] = lambda: None) -> Outcome:
        """Never raises: whatever goes wrong with a save is told, and training goes on. Calls `written` when all
        files are there, or will not be."""
        begun_s, begun_cpu_s = time.perf_counter(), time.thread_time()
        outcome = Outcome(snapshot.step, snapshot.metric)
        try:
            outcome = self._write(snapshot, outcome)
        except Exception as problem:
            outcome = replace(outcome, reason=_reason(problem))
            self._littered = True
        written()
        try:
            self._tidy(snapshot.step, saved=not outcome.reason)
        except Exception as problem:
            outcome = replace(outcome, untidy=_reason(problem))
        took_s, took_cpu_s = time.perf_counter() - begun_s, time.thread_time() - begun_cpu_s
        return replace(outcome, write_s=took_s, cpu_s=took_cpu_s)

    def _write(self, snapshot: Snapshot, outcome: Outcome) -> Outcome:
        blobs, refs = pack(snapshot.tensors)
        manifest = Manifest(
            step=snapshot.step,
            created=time.time(),
            job_sha256=self._job_sha256,
            metric=snapshot.metric,
            tree=snapshot.tree,
            blobs={digest: blob.size_bytes for digest, blob in blobs.items()} | dict(snapshot.others),
            tensors=refs,
            info=snapshot.info,
        )
        raw = manifest.dump()
        with self._files.saving():
            present = self._files.sizes("blobs")
            new = [blob for blob in blobs.values() if not self._stored(blob, present)]
            for blob in new:
                self._files.write(blob_path(blob.digest), blob.chunks)
            self._files.write(manifest_path(self._directory, snapshot.step), [raw])
        self._sound |= blobs.keys()
        written = sum(blob.size_bytes for blob in new) + sum(snapshot.others.values()) + len(raw)
        return replace(outcome, size_bytes=manifest.size_bytes, written_bytes=written)

    def _stored(self, blob: Blob, present: dict[str, int]) -> bool:
        """A blob that is there need not be sound: one that this process has not seen to be is read once.

        Where nothing keeps other processes from sweeping, it is written again instead, which makes it young.
        """
        path = blob_path(blob.digest)
        if present.get(path) != blob.size_bytes:
            return False
        return blob.digest in self._sound or (self._files.locks and self._is_sound(path, blob.digest))

    def _is_sound(self, path: str, digest: str) -> bool:
        try:
            with self._files.open(path) as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == digest  # type: ignore[arg-type]
        except OSError:
            return False

    def _tidy(self, step: int, *, saved: bool) -> None:
        if saved:
            self._retire(step)
        if self._littered:
            self._littered = not sweep(self._files)

    def _retire(self, step: int) -> None:
        """Drop the manifests that retention does not keep; the one just written stays whatever its step."""
        self.damaged.discard(step)
        manifests, broken = self._manifests()
        rule = self._retention
        metas = [(m.step, m.metric) for m in manifests.values()]
        drop = {*to_drop(metas, rule.keep, rule.keep_best, rule.sign), *broken} - {step}
        for old in drop:
            self._files.remove(manifest_path(self._directory, old))
        self._littered = self._littered or bool(drop)
        self.damaged.clear()
        # Only what a manifest of ours refers to is safe from the sweeps of others.
        self._sound &= {digest for old, m in manifests.items() if old not in drop for digest in m.blobs}

    def _manifests(self) -> tuple[dict[int, Manifest], set[int]]:
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


def sweep(files: Files) -> bool:
    """Remove the blobs that no manifest of any name refers to, and what crashed saves left.

    False if something remains for next time, because somebody is saving or it is too young.
    """
    with files.sweeping() as alone:
        if not alone:
            return False
        present = files.sizes()
        needed = _needed(files, present)
        litter = [p for p in present if is_temp(p) or (p.startswith("blobs/") and p not in needed)]
        stale = [path for path in litter if files.stale(path)]
        for path in stale:
            files.remove(path)
        return len(stale) == len(litter)


def _needed(files: Files, present: dict[str, int]) -> set[str]:
    """The blobs that manifests refer to. A damaged one needs none; an unreadable one stops the sweep."""
    needed: set[str] = set()
    for path in present:
        if step_of(path) is None:
            continue
        try:
            needed |= {blob_path(digest) for digest in read_manifest(files, path).blobs}
        except CheckpointError as problem:
            if problem.code == "SH507" or isinstance(problem.__cause__, OSError):
                raise
    return needed


def _reason(problem: Exception) -> str:
    return str(problem) or type(problem).__name__
