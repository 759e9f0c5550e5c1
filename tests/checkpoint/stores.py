"""Stores to test with."""

from __future__ import annotations

from shoal.checkpoint.files import open_files
from shoal.checkpoint.manifest import list_manifests
from shoal.checkpoint.store import Store

from .states import Told, training_state


def make(path, told=None, **options) -> Store:
    return Store(path, **{"job_sha256": "job", "every": ("steps", 1), "tell": told or Told(), **options})


def save(store: Store, step: int, **options) -> None:
    store.save(step, training_state(step), **options)
    store.wait()


def blobs(path) -> dict[str, int]:
    return open_files(path).sizes("blobs")


def steps(path, name="") -> list[int]:
    return [m.step for m in list_manifests(path, name=name)]
