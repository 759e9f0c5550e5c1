"""Read checkpoints and verify every bit."""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor

from shoal.checkpoint.blobs import TensorSpec, decode_blob
from shoal.checkpoint.files import CheckpointFiles
from shoal.checkpoint.manifest import Manifest, blob_path
from shoal.checkpoint.state_tree import State, subtree, tensor_names, unflatten
from shoal.errors import error


def read_state(files: CheckpointFiles, manifest: Manifest, *, section: str = "") -> State:
    """The state of a checkpoint, or one section of it (`loop`, or a nested one: `optimizer/param_groups`). Reads only
    the blobs that the section needs.

    The tensors belong to the caller and share no memory. SH502 if anything is missing or damaged.
    """
    skeleton = manifest.tree
    for key in section.split("/") if section else ():
        skeleton = subtree(skeleton, key)
    tensors = _read_tensors(files, manifest, set(tensor_names(skeleton)))
    return unflatten(tensors, skeleton)


def missing_blob_reason(files: CheckpointFiles, manifest: Manifest) -> str:
    """Why a checkpoint cannot be complete, from the sizes of its blobs alone; '' if all sizes are right."""
    present = files.sizes("blobs")
    for digest, size in manifest.blobs.items():
        found = present.get(blob_path(digest))
        if found is None:
            return f"the blob {digest[:12]}… is missing"
        if found != size:
            return f"the blob {digest[:12]}… is {found} bytes long instead of {size}"
    return ""


def _read_tensors(files: CheckpointFiles, manifest: Manifest, wanted: set[str]) -> dict[str, Tensor]:
    if unknown := wanted - manifest.tensors.keys():
        raise error("SH502", f"the manifest does not list the tensor {min(unknown)!r}", where=files.where)
    specs: dict[str, dict[str, TensorSpec]] = defaultdict(dict)
    wanted_by_blob: dict[str, list[str]] = defaultdict(list)
    for name, ref in manifest.tensors.items():
        specs[ref.blob][ref.key] = (ref.dtype, ref.shape)
        if name in wanted:
            wanted_by_blob[ref.blob].append(name)
    tensors: dict[str, Tensor] = {}
    for digest, names in wanted_by_blob.items():
        content = _read_blob(files, digest, specs[digest])
        taken = set()
        for name in names:
            key = manifest.tensors[name].key
            # Equal tensors are stored once, but the tensors returned share no memory.
            tensors[name] = content[key].clone() if key in taken else content[key]
            taken.add(key)
    return tensors


def _read_blob(files: CheckpointFiles, digest: str, specs: dict[str, TensorSpec]) -> dict[str, Tensor]:
    path = blob_path(digest)
    where = f"{files.where.rstrip('/')}/{path}"
    try:
        with files.open(path) as file:
            return decode_blob(file, specs, digest=digest, where=where)
    except FileNotFoundError:
        raise error("SH502", "the blob is missing", where=where) from None
    except OSError as problem:
        raise error("SH502", f"the blob cannot be read: {problem}", where=where) from problem
