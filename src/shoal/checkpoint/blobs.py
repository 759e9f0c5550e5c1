"""Tensors in safetensors files that are named by the SHA-256 of their content.

A large tensor is a blob of its own, so it is stored once while it does not change. The small tensors of a section of
the state share a blob. The header of a blob follows from the manifest: the reader compares it and parses nothing, so
nothing in a damaged or hostile blob is ever interpreted.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO

import torch
from torch import Tensor

from shoal.checkpoint.manifest import TensorRef
from shoal.checkpoint.tensor_bytes import DTYPE_CODES, DTYPES, bytes_of
from shoal.errors import ShoalError, error

LARGE_BYTES = 64 << 10
SINGLE_TENSOR_KEY = "tensor"

TensorSpec = tuple[str, tuple[int, ...]]
"""safetensors' dtype code, and the shape."""


@dataclass(frozen=True)
class Blob:
    """A file to write: its name, its size, and its content in chunks that need not be contiguous."""

    digest: str
    size_bytes: int
    chunks: tuple[memoryview | bytes, ...]


def encode_blob(tensors: Mapping[str, Tensor], *, metadata: Mapping[str, str] | None = None) -> Blob:
    """A safetensors file. Its chunks are views of the tensors' memory: do not change the tensors until it is
    written."""
    specs = {key: tensor_spec(tensor) for key, tensor in tensors.items()}
    chunks: list[memoryview | bytes] = [safetensors_header(specs, metadata=metadata)]
    chunks += [bytes_of(tensors[key]) for key in safetensors_order(specs)]
    sha256 = hashlib.sha256()
    for chunk in chunks:
        sha256.update(chunk)
    return Blob(sha256.hexdigest(), sum(len(chunk) for chunk in chunks), tuple(chunks))


def pack_tensors(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Blob], dict[str, TensorRef]]:
    """The blobs that hold a state's tensors, by digest, and the location of each tensor."""
    blobs: dict[str, Blob] = {}
    refs: dict[str, TensorRef] = {}
    for group in _blob_groups(tensors):
        # The key of a single tensor is not its name, so equal tensors with different names are one blob.
        keys = {name: SINGLE_TENSOR_KEY if len(group) == 1 else name for name in group}
        blob = encode_blob({keys[name]: tensors[name] for name in group})
        blobs[blob.digest] = blob
        for name in group:
            refs[name] = TensorRef(blob.digest, keys[name], *tensor_spec(tensors[name]))
    return blobs, refs


def decode_blob(file: BinaryIO, specs: Mapping[str, TensorSpec], *, digest: str, where: str = "") -> dict[str, Tensor]:
    """The tensors of a blob, which must hold exactly `specs`. SH502 unless every bit is right.

    Allocates at most the size of the file.
    """
    start = _expected_header(specs, where=where)
    size_bytes = len(start) + sum(_size_bytes(spec) for spec in specs.values())
    if (found := file.seek(0, 2)) != size_bytes:
        raise _damaged_error(f"it is {found} bytes long instead of {size_bytes}", where)
    file.seek(0)
    if file.read(len(start)) != start:
        raise _damaged_error("its header is not the one expected", where)
    sha256 = hashlib.sha256(start)
    tensors = {}
    for key in safetensors_order(specs):
        tensors[key] = _empty(specs[key], where=where)
        view = bytes_of(tensors[key])
        if file.readinto(view) != len(view):  # type: ignore[attr-defined]
            raise _damaged_error("it ends too early", where)
        sha256.update(view)
    if sha256.hexdigest() != digest:
        raise _damaged_error("its content does not match its SHA-256", where)
    return tensors


def safetensors_header(specs: Mapping[str, TensorSpec], *, metadata: Mapping[str, str] | None = None) -> bytes:
    """The header of a safetensors file: a length and a JSON table, padded so that the data is aligned."""
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    begin = 0
    for key in safetensors_order(specs):
        code, shape = specs[key]
        end = begin + _size_bytes(specs[key])
        table[key] = {"dtype": code, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(table, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def tensor_spec(tensor: Tensor) -> TensorSpec:
    return DTYPE_CODES[tensor.dtype], tuple(tensor.shape)


def _blob_groups(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Names that share a blob: each large tensor is alone, small tensors are grouped by the first part of their
    names."""
    alone = [[name] for name, tensor in tensors.items() if tensor.nbytes >= LARGE_BYTES]
    sections: dict[str, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        if tensor.nbytes < LARGE_BYTES:
            sections[name.split("/")[1] if name else ""].append(name)
    return alone + list(sections.values())


def safetensors_order(specs: Mapping[str, TensorSpec]) -> list[str]:
    """The order that safetensors uses: wide types first, so that every tensor is aligned to its type."""
    return sorted(specs, key=lambda key: (-DTYPES[specs[key][0]].itemsize, key))


def _size_bytes(spec: TensorSpec) -> int:
    return DTYPES[spec[0]].itemsize * math.prod(spec[1])


def _expected_header(specs: Mapping[str, TensorSpec], *, where: str) -> bytes:
    unknown = [code for code, _ in specs.values() if code not in DTYPES]
    if unknown:
        raise _damaged_error(f"unknown dtype {unknown[0]!r}", where)
    return safetensors_header(specs)


def _empty(spec: TensorSpec, *, where: str) -> Tensor:
    try:
        return torch.empty(spec[1], dtype=DTYPES[spec[0]])
    except (RuntimeError, TypeError, ValueError, OverflowError) as problem:
        raise _damaged_error(f"no tensor has the shape {spec[1]}", where) from problem


def _damaged_error(reason: str, where: str) -> ShoalError:
    return error("SH502", f"the blob is damaged: {reason}", where=where)
