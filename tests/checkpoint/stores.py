"""Stores to test with."""

from __future__ import annotations

from shoal.checkpoint.files import open_files
from shoal.checkpoint.manifest import list_manifests
from shoal.checkpoint.store import CheckpointStore

from .states import EventRecorder, training_state


def make_store(path, recorder=None, **options) -> CheckpointStore:
    return CheckpointStore(
        path, **{"job_sha256": "job", "every": ("steps", 1), "emit": recorder or EventRecorder(), **options}
    )


def save_and_wait(store: CheckpointStore, step: int, **options) -> None:
    store.save(step, training_state(step), **options)
    store.wait()


def blob_sizes(path) -> dict[str, int]:
    return open_files(path).sizes("blobs")


def saved_steps(path, name="") -> list[int]:
    return [m.step for m in list_manifests(path, name=name)]
