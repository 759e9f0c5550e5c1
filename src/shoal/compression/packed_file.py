"""model.packed: weights as numbers of shared values, entropy coded. Plain data: a checked header and one LZMA stream.

The file is the magic bytes, the header's length (4 bytes, little-endian), the header (JSON, LZMA), and the stream. The
stream holds, for each tensor in the header's order, either its values or its list of values and its codes (one byte
each, before compression).
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, ValidationError
from torch import Tensor

from shoal.checkpoint.files import atomic_replace
from shoal.compression.rounding import share_weight
from shoal.errors import ShoalError, error
from shoal.spec.base import Spec

MAGIC = b"SHOALPK1"
MAX_HEADER = 1 << 24
MAX_VALUES = 1 << 34
_FILTERS = [
    {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 22, "lc": 0, "lp": 0, "pb": 0}
]
_TYPES = {"float32": torch.float32, "float16": torch.float16, "int64": torch.int64, "uint8": torch.uint8}


class PackedTensor(Spec):
    """`stored`: the type of its values in the file. `values`: the length of the list of shared values, or 0."""

    name: str
    shape: list[NonNegativeInt]
    dtype: Literal["float32", "int64", "uint8"]
    stored: Literal["float32", "float16", "int64", "uint8"]
    values: Annotated[int, Field(ge=0, le=256)] = 0

    @property
    def count(self) -> int:
        return math.prod(self.shape)


class PackedHeader(Spec):
    tensors: list[PackedTensor]
    sha256: str


def write_packed(target: Path, state: Mapping[str, Tensor], *, bits: int) -> None:
    """Weights with two or more dimensions share 2 ** bits values; other floats are stored with 16 bits.

    SH662 if a tensor has a type that the file cannot hold.
    """
    rows, parts = [], []
    for name, tensor in sorted(state.items()):
        row, content = _encode(name, tensor.detach().cpu(), bits)
        rows.append(row)
        parts.append(content)
    content = b"".join(parts)
    header = PackedHeader(tensors=rows, sha256=hashlib.sha256(content).hexdigest())
    text = json.dumps(header.model_dump(mode="json"), separators=(",", ":")).encode()
    packed_header = lzma.compress(text, format=lzma.FORMAT_RAW, filters=_FILTERS)
    stream = lzma.compress(content, format=lzma.FORMAT_RAW, filters=_FILTERS)
    with atomic_replace(target) as temporary:
        temporary.write_bytes(MAGIC + len(packed_header).to_bytes(4, "little") + packed_header + stream)


def _encode(name: str, tensor: Tensor, bits: int) -> tuple[PackedTensor, bytes]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ("float32", "int64", "uint8"):
        raise error("SH662", f"'{name}' is {dtype}, which a packed file cannot hold", where="pack")
    fields = {"name": name, "shape": list(tensor.shape), "dtype": dtype}
    if dtype == "float32" and tensor.dim() > 1 and tensor.numel() > 2**bits:
        codes, values = share_weight(tensor, bits)
        row = PackedTensor.model_validate({**fields, "stored": "float32", "values": len(values)})
        return row, values.numpy().astype("<f4").tobytes() + codes.numpy().tobytes()
    small = dtype == "float32" and bool((tensor.abs() < 60_000).all())
    stored = "float16" if small else dtype
    row = PackedTensor.model_validate({**fields, "stored": stored})
    return row, tensor.to(_TYPES[stored]).numpy().tobytes()


def read_packed(source: Path) -> dict[str, Tensor]:
    """The weights by name. SH667 if the file is damaged, or is something else."""
    try:
        raw = source.read_bytes()
    except OSError as failure:
        raise error("SH667", f"it cannot be read: {failure.strerror}", where=str(source)) from failure
    try:
        return _decode(raw, where=str(source))
    except (ValidationError, ValueError, lzma.LZMAError, RecursionError, OverflowError, EOFError) as failure:
        raise _damaged(str(failure).splitlines()[0], str(source)) from failure


def _decode(raw: bytes, *, where: str) -> dict[str, Tensor]:
    start = len(MAGIC) + 4
    length = int.from_bytes(raw[len(MAGIC) : start], "little")
    if raw[: len(MAGIC)] != MAGIC or not 0 < length <= min(MAX_HEADER, len(raw) - start):
        raise ValueError("it does not begin like a packed model")
    header = PackedHeader.model_validate(json.loads(_expand(raw[start : start + length], MAX_HEADER)))
    sizes = [_stored_bytes(one) for one in header.tensors]
    if sum(one.count for one in header.tensors) > MAX_VALUES:
        raise ValueError("it has too many values")
    content = _expand(raw[start + length :], sum(sizes))
    if len(content) != sum(sizes) or hashlib.sha256(content).hexdigest() != header.sha256:
        raise ValueError("its content has another SHA-256 than its header says")
    found, position = {}, 0
    for one, size in zip(header.tensors, sizes, strict=True):
        found[one.name] = _tensor(one, content[position : position + size])
        position += size
    return found


def _expand(data: bytes, most: int) -> bytes:
    """At most this many bytes: a small file must not fill the memory."""
    decoder = lzma.LZMADecompressor(format=lzma.FORMAT_RAW, filters=_FILTERS)
    content = decoder.decompress(data, max_length=most + 1)
    if len(content) > most:
        raise ValueError("it expands to more than its header says")
    return content


def _stored_bytes(one: PackedTensor) -> int:
    if one.values:
        return 4 * one.values + one.count
    return one.count * torch.empty(0, dtype=_TYPES[one.stored]).element_size()


def _tensor(one: PackedTensor, content: bytes) -> Tensor:
    if not one.values:
        kinds = {"float32": "<f4", "float16": "<f2", "int64": "<i8", "uint8": "u1"}
        flat = np.frombuffer(content, dtype=kinds[one.stored])
    else:
        values = np.frombuffer(content[: 4 * one.values], dtype="<f4")
        codes = np.frombuffer(content[4 * one.values :], dtype=np.uint8)
        if codes.size and int(codes.max()) >= one.values:
            raise ValueError(f"'{one.name}' has a code without a value")
        flat = values[codes]
    return torch.from_numpy(flat.copy()).to(_TYPES[one.dtype]).reshape(one.shape)


def _damaged(why: str, where: str) -> ShoalError:
    return error("SH667", why, where=where)
