"""The contents of a checkpoint as one small file with a checksum. Torch-free: the driver reads it too.

Layout of a store: `blobs/ab/<sha256>` holds tensors, `<name or "manifests">/<step>.json` says which of them
make a checkpoint. A checkpoint exists from the moment its manifest does.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.checkpoint.files import CheckpointFiles, open_files
from shoal.errors import CheckpointError, error

FORMAT = 1
DEFAULT_NAME = "manifests"
MAX_MANIFEST_BYTES = 256 << 20

_DIGEST = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(r"([0-9]{12,20})\.json")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class TensorRef:
    """Location of a tensor's values: the blob and the key in it. `dtype` is safetensors' code."""

    blob: str
    key: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """One checkpoint. `tree` is the state with names in place of tensors; `blobs` maps digests to sizes."""

    step: int
    created: float
    job_sha256: str | None
    metric: float | None
    tree: Any
    blobs: Mapping[str, int]
    tensors: Mapping[str, TensorRef]
    info: Mapping[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def size_bytes(self) -> int:
        """Bytes of all its blobs, including those shared with other checkpoints."""
        return sum(self.blobs.values())

    def dump(self) -> bytes:
        """The manifest as JSON with a checksum."""
        body = {
            "step": self.step,
            "created": self.created,
            "job_sha256": self.job_sha256,
            "metric": _metric_to_json(self.metric),
            "info": dict(self.info),
            "tree": self.tree,
            "blobs": dict(self.blobs),
            "tensors": {n: [t.blob, t.key, t.dtype, list(t.shape)] for n, t in self.tensors.items()},
        }
        return _canonical({"format": self.format, "sha256": _checksum(body), "body": body})


def parse_manifest(raw: bytes, *, where: str = "") -> Manifest:
    """Parse the bytes of a manifest file. SH502 if they are damaged, SH507 if a newer version wrote them."""
    try:
        document = json.loads(raw)
        if not isinstance(document, dict):
            raise ValueError("it is not a JSON object")
        version = _parse_integer(document.get("format"), "format")
        if version > FORMAT:
            raise error("SH507", f"format {version}; this version reads formats up to {FORMAT}", where=where)
        if version < 1:
            raise ValueError(f"there is no format {version}")
        body = document.get("body")
        if _checksum(body) != document.get("sha256"):
            raise ValueError("its checksum does not match its content")
        return _from_body(body)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as problem:
        raise error("SH502", f"the manifest is damaged: {_reason(problem)}", where=where) from None


def steps_to_delete(
    metas: Iterable[tuple[int, float | None]], keep: int, keep_best: int, metric_sign: int
) -> list[int]:
    """The steps to delete: all but the newest `keep` and the best `keep_best`.

    `metric_sign` is 1 if a larger metric is better, -1 if a smaller one is. Among equal metrics the earlier step wins.
    """
    metas = sorted(metas, reverse=True)
    newest = {step for step, _ in metas[:keep]}
    measured = [(m, step) for step, m in metas if m is not None and not math.isnan(m)]
    measured.sort(key=lambda pair: (-metric_sign * pair[0], pair[1]))
    best = {step for _, step in measured[:keep_best]}
    return sorted(step for step, _ in metas if step not in newest | best)


# ---- in a store ----


def manifest_directory(name: str) -> str:
    """The directory of the manifests of a name. The name is '' in a store for a single run."""
    if name and (name == "blobs" or not _NAME.fullmatch(name)):
        raise ValueError(f"not a name for a directory of manifests: {name!r}")
    return name or DEFAULT_NAME


def manifest_path(directory: str, step: int) -> str:
    return f"{directory}/{step:012d}.json"


def blob_path(digest: str) -> str:
    return f"blobs/{digest[:2]}/{digest}"


def step_from_path(path: str) -> int | None:
    """The step of a manifest path; None for any other path."""
    directory, _, file = path.rpartition("/")
    match = _FILE.fullmatch(file)
    return int(match[1]) if match and directory and not directory.startswith("blobs") else None


def steps_in(files: CheckpointFiles, directory: str) -> list[int]:
    """The steps that have a manifest file, newest first. The manifests may be damaged."""
    found = (step_from_path(path) for path in files.sizes(directory))
    return sorted((step for step in found if step is not None), reverse=True)


def read_manifest(files: CheckpointFiles, path: str) -> Manifest:
    """SH501 if the file does not exist, SH502 if it is damaged."""
    where = f"{files.where.rstrip('/')}/{path}"
    try:
        with files.open(path) as file:
            size_bytes = min(file.seek(0, 2), MAX_MANIFEST_BYTES + 1)  # read() allocates what it is asked for
            file.seek(0)
            raw = file.read(size_bytes)
    except FileNotFoundError:
        raise error("SH501", "there is no such checkpoint", where=where) from None
    except OSError as problem:
        raise error("SH502", f"the manifest cannot be read: {problem}", where=where) from problem
    if len(raw) > MAX_MANIFEST_BYTES:
        raise error("SH502", f"the manifest is damaged: it is larger than {MAX_MANIFEST_BYTES} bytes", where=where)
    manifest = parse_manifest(raw, where=where)
    if manifest.step != step_from_path(path):
        raise error("SH502", f"the manifest is damaged: it is of step {manifest.step}", where=where)
    return manifest


def list_manifests(path: str | os.PathLike[str], *, name: str = "") -> list[Manifest]:
    """The undamaged manifests at a store's path, newest first. Does not check blobs."""
    files, directory = open_files(path), manifest_directory(name)
    found = []
    for step in steps_in(files, directory):
        try:
            found.append(read_manifest(files, manifest_path(directory, step)))
        except CheckpointError:
            continue
    return found


def newest_manifest(path: str | os.PathLike[str], *, name: str = "") -> Manifest | None:
    """The undamaged manifest with the highest step. Does not check blobs."""
    files, directory = open_files(path), manifest_directory(name)
    for step in steps_in(files, directory):
        try:
            return read_manifest(files, manifest_path(directory, step))
        except CheckpointError:
            continue
    return None


# ---- the body, checked field by field: a checksum detects accidents, not forgeries ----


def _from_body(body: Any) -> Manifest:
    """ValueError names the field that is wrong. No field is ever used as a path: a blob is found by its SHA-256."""
    blobs = {_parse_digest(digest): _parse_integer(n, "blobs", digest) for digest, n in _items(body, "blobs")}
    tensors = {name: _parse_tensor(name, value, blobs) for name, value in _items(body, "tensors")}
    job, info = body["job_sha256"], body["info"]
    if not isinstance(job, str | None) or not isinstance(info, dict):
        raise ValueError("job_sha256 or info is of the wrong type")
    return Manifest(
        step=_parse_integer(body["step"], "step"),
        created=_parse_number(body["created"], "created"),
        job_sha256=job,
        metric=None if body["metric"] is None else _parse_number(body["metric"], "metric"),
        tree=body["tree"],
        blobs=blobs,
        tensors=tensors,
        info=info,
    )


def _items(body: Any, field: str) -> Iterable[tuple[str, Any]]:
    if not isinstance(body[field], dict):
        raise ValueError(f"{field} is not an object")
    return body[field].items()  # type: ignore[no-any-return]


def _parse_tensor(name: str, value: Any, blobs: Mapping[str, int]) -> TensorRef:
    if not isinstance(value, list) or len(value) != 4:
        raise ValueError(f"tensors[{name!r}] is not a list of blob, key, dtype and shape")
    blob, key, dtype, shape = value
    if not isinstance(blob, str) or blob not in blobs:
        raise ValueError(f"tensors[{name!r}] refers to a blob that is not listed")
    if not isinstance(key, str) or not isinstance(dtype, str) or not isinstance(shape, list):
        raise ValueError(f"tensors[{name!r}] has a key, dtype or shape of the wrong type")
    return TensorRef(blob, key, dtype, tuple(_parse_integer(size, "tensors", name) for size in shape))


def _parse_digest(text: str) -> str:
    if not _DIGEST.fullmatch(text):
        raise ValueError(f"blobs has the name {text!r:.80}, which is not a SHA-256")
    return text


def _parse_integer(value: Any, field: str, key: str | None = None) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        place = field if key is None else f"{field}[{key!r:.80}]"
        raise ValueError(f"{place} is or contains {value!r:.80}, not a whole number from 0 to 2^63")
    return value


def _parse_number(value: Any, field: str) -> float:
    """Infinities and NaN are written as text; see `_metric_to_json`."""
    if type(value) not in (int, float) and value not in ("inf", "-inf", "nan"):
        raise ValueError(f"{field} is {value!r:.80}, not a number")
    return float(value)


def _metric_to_json(metric: float | None) -> float | str | None:
    """JSON cannot represent infinities and NaN: they are written as text."""
    return metric if metric is None or math.isfinite(metric) else str(float(metric))


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _checksum(body: Any) -> str:
    return hashlib.sha256(_canonical(body)).hexdigest()


def _reason(problem: Exception) -> str:
    if isinstance(problem, RecursionError):
        return "it is nested too deeply"
    if isinstance(problem, KeyError):
        return f"{problem} is missing"
    return str(problem)
