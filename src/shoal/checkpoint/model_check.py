"""Compare an exported model with the SHA-256 that a run reports. Torch-free: the driver does it before the receipt."""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError, error

WEIGHTS = "model.safetensors"
MODEL_INFO = "model.json"
MAX_HEADER_BYTES = 256 << 20
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class VerifiedModel:
    """The SHA-256 of the weights in the file, computed from its bytes. It differs from that of the run if the run has
    tensors that the file cannot hold, such as the rows of sparse tables."""

    weights_sha256: str
    size_bytes: int


def verify_model(directory: Path, *, weights_sha256: str) -> VerifiedModel:
    """Read the whole model. SH622 unless its weights have the SHA-256 that stands in model.json, and model.json has
    `weights_sha256` as that of the run."""
    try:
        info = json.loads((directory / MODEL_INFO).read_bytes())
        found = _hash_weights(directory / WEIGHTS, info["tensors"])
        written, of_run = info["weights_sha256"], info.get("run_weights_sha256", info["weights_sha256"])
    except OSError as failure:
        raise _refuted(f"its model cannot be read: {failure.strerror}", directory) from failure
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as failure:
        raise _refuted(f"its model is damaged: {failure}", directory) from failure
    if of_run != weights_sha256:
        raise _refuted(f"it reports weights {weights_sha256:.12}, and its model has {of_run!s:.12}", directory)
    if written != found.weights_sha256:
        raise _refuted(f"the weights in {WEIGHTS} have another SHA-256 than {MODEL_INFO} says", directory)
    return found


def _refuted(why: str, directory: Path) -> ShoalError:
    return error("SH622", why, where=str(directory))


def _hash_weights(path: Path, tensors: Mapping[str, Mapping[str, Any]]) -> VerifiedModel:
    """`checkpoint.sha256.weights_sha256` of a safetensors file, whose tensors have these types and shapes."""
    with path.open("rb") as file:
        size_bytes = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > min(MAX_HEADER_BYTES, size_bytes):
            raise ValueError(f"its header has {length} bytes")
        table = json.loads(file.read(length))
        table.pop("__metadata__", None)
        if table.keys() != tensors.keys():
            raise ValueError(f"{WEIGHTS} and {MODEL_INFO} have different tensors")
        sha256, start = hashlib.sha256(), _LENGTH_BYTES + length
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
            for name in sorted(tensors):
                begin, end = (start + int(offset) for offset in table[name]["data_offsets"])
                if not start <= begin <= end <= size_bytes:
                    raise ValueError(f"the tensor {name} is not in the file")
                head = [name, f"torch.{tensors[name]['dtype']}", tensors[name]["shape"]]
                sha256.update(json.dumps(head).encode("ascii"))
                with view[begin:end] as values:
                    sha256.update(values)
    return VerifiedModel(sha256.hexdigest(), size_bytes)
