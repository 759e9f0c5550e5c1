"""Which files hold the weights at a path, so that they can be sent to another machine. Torch-free, for the driver."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from shoal.checkpoint.files import open_files
from shoal.checkpoint.manifest import blob_path, manifest_path, newest_manifest, read_manifest, step_from_path
from shoal.checkpoint.model_check import WEIGHTS
from shoal.errors import error


class WeightFiles(NamedTuple):
    """`names` are relative to `root`. `given` is what `load_weights` takes, relative to `root`."""

    root: Path
    names: list[str]
    given: str


def find_weight_files(path: Path) -> WeightFiles:
    """The files that `load_weights` would read: the finished model of a run, or its newest checkpoint. SH501 if there
    is nothing to load."""
    if (step := step_from_path(str(path))) is not None:
        return _of_manifest(path.parent.parent, path.parent.name, step)
    for file in (path, path / WEIGHTS, path / "model" / WEIGHTS):
        if file.is_file():
            return WeightFiles(file.parent, [file.name], file.name)
    for store in (path, path / "checkpoints"):
        if (store / "blobs").is_dir():
            return _of_newest(store)
    fix = "Give a run, a checkpoint or a .safetensors file."
    raise error("SH501", "no weights here", where=str(path), fix=fix)


def _of_newest(store: Path) -> WeightFiles:
    manifests = [path for path in open_files(store).sizes() if step_from_path(path) is not None]
    names = sorted({path.split("/")[0] for path in manifests})
    if len(names) > 1:
        fix = f"Give one of their manifests, such as {store / names[0]}/<step>.json."
        raise error("SH501", f"several runs share this store: {', '.join(names)}", where=str(store), fix=fix)
    newest = newest_manifest(store, name=names[0]) if names else None
    if newest is None:
        raise error("SH501", "no checkpoint here is complete", where=str(store), fix="Give another run.")
    return _of_manifest(store, names[0], newest.step)


def _of_manifest(store: Path, name: str, step: int) -> WeightFiles:
    path = manifest_path(name, step)
    blobs = read_manifest(open_files(store), path).blobs
    return WeightFiles(store, [path, *map(blob_path, sorted(blobs))], path)
