"""model.packed: weights as numbers of shared values, entropy coded. Plain data: a checked header, and streams.

The file is the magic bytes, the SHA-256 of everything after it, the header's length (4 bytes, little-endian), the
header (JSON, LZMA), an LZMA stream, and range-coded streams. The LZMA stream holds, for each tensor in the header's
order, either its values or its list of values and its codes (one byte each). Codes of matrices that are not too large
are range coded instead.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, NonNegativeInt, ValidationError
from torch import Tensor

from shoal.checkpoint.files import atomic_replace
from shoal.compression.range_coder import MAX_CODES, decode_codes, encode_codes
from shoal.compression.rounding import codes_of_rounded, share_weight
from shoal.errors import ShoalError, error
from shoal.spec.base import Spec

MAGIC = b"SHOALPK2"
_DIGEST = 32
MAX_HEADER = 1 << 24
MAX_VALUES = 1 << 34
_FILTERS = [
    {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 1 << 22, "lc": 0, "lp": 0, "pb": 0}
]
_TYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
HALF_CLOSE = 2.0**-10
"""Floats are stored with 16 bits if none of them changes by more than this share of the largest."""


class PackedTensor(Spec):
    """`stored`: the type of its values in the file. `values`: the length of the list of shared values, or 0. `coded`:
    the bytes of its range-coded codes; 0 if they are in the LZMA stream. `bits`: codes are multiples of a scale per
    output, folded to numbers from 0; 0 if they are numbers of shared values."""

    name: str
    shape: list[NonNegativeInt]
    dtype: Literal["float32", "int64", "uint8", "bool"]
    stored: Literal["float32", "float16", "int64", "uint8", "bool"]
    values: Annotated[int, Field(ge=0, le=256)] = 0
    coded: NonNegativeInt = 0
    bits: Annotated[int, Field(ge=0, le=8)] = 0

    @property
    def rows(self) -> tuple[int, int]:
        """Its shape as a matrix, one row per output."""
        if not self.shape:
            raise ValueError(f"'{self.name}' has no outputs")
        return self.shape[0], self.count // max(self.shape[0], 1)

    @property
    def count(self) -> int:
        return math.prod(self.shape)


class PackedHeader(Spec):
    """`stream`: the bytes of the LZMA stream."""

    tensors: list[PackedTensor]
    stream: NonNegativeInt


def check_packable(state: Mapping[str, Tensor]) -> None:
    """SH662 if a tensor has a type that the file cannot hold."""
    for name, tensor in sorted(state.items()):
        dtype = _dtype_of(tensor)
        if dtype not in ("float32", "int64", "uint8", "bool"):
            raise error("SH662", f"'{name}' is {dtype}, which a packed file cannot hold", where="pack")


def _dtype_of(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def write_packed(
    target: Path,
    state: Mapping[str, Tensor],
    *,
    bits: int,
    rounded: Collection[str] = (),
    exact: Collection[str] = (),
) -> None:
    """Weights with two or more dimensions share 2 ** bits values; other floats are stored with 16 bits if that is close
    to them. The weights in `rounded` are multiples of a scale per output instead; what is in `exact` stays as it is.

    SH662 if a tensor has a type that the file cannot hold.
    """
    check_packable(state)
    rows, parts, streams = [], [], []
    for name, tensor in sorted(state.items()):
        pack = _encode_exactly if name in exact else _encode_rounded if name in rounded else _encode
        row, content, coded = pack(name, tensor.detach().cpu(), bits)
        rows.append(row)
        parts.append(content)
        streams.append(coded)
    stream = _compressed(b"".join(parts))
    fields = PackedHeader(tensors=rows, stream=len(stream)).model_dump(mode="json", exclude_defaults=True)
    header = _compressed(json.dumps(fields, separators=(",", ":")).encode())
    body = b"".join([len(header).to_bytes(4, "little"), header, stream, *streams])
    with atomic_replace(target) as temporary:
        temporary.write_bytes(MAGIC + hashlib.sha256(body).digest() + body)


def _compressed(content: bytes) -> bytes:
    return lzma.compress(content, format=lzma.FORMAT_RAW, filters=_FILTERS)


def _encode(name: str, tensor: Tensor, bits: int) -> tuple[PackedTensor, bytes, bytes]:
    """The tensor's entry, what it has in the LZMA stream, and its range-coded codes."""
    floats = tensor.dtype == torch.float32 and bool(tensor.isfinite().all())
    if floats and tensor.dim() > 1 and tensor.numel() > 2**bits:
        fields: dict[str, Any] = {"name": name, "shape": list(tensor.shape), "dtype": "float32"}
        codes, values = share_weight(tensor, bits)
        listed, matrix = values.numpy().astype("<f4").tobytes(), codes.flatten(1).numpy()
        coded = encode_codes(matrix, _width(len(values))) if matrix.size <= MAX_CODES else b""
        row = PackedTensor(**fields, stored="float32", values=len(values), coded=len(coded))
        return row, listed + (b"" if coded else matrix.tobytes()), coded
    return _encode_exactly(name, tensor.half() if floats and _is_half_close(tensor) else tensor, bits)


def _is_half_close(tensor: Tensor) -> bool:
    return not tensor.numel() or bool((tensor.half().float() - tensor).abs().max() <= HALF_CLOSE * tensor.abs().max())


def _encode_exactly(name: str, tensor: Tensor, bits: int) -> tuple[PackedTensor, bytes, bytes]:
    """16 bits are read back as 32."""
    stored = _dtype_of(tensor)
    dtype = "float32" if stored == "float16" else stored
    row = PackedTensor.model_validate({"name": name, "shape": list(tensor.shape), "dtype": dtype, "stored": stored})
    return row, tensor.contiguous().numpy().tobytes(), b""


def _encode_rounded(name: str, tensor: Tensor, bits: int) -> tuple[PackedTensor, bytes, bytes]:
    codes, scale = codes_of_rounded(tensor, bits)
    matrix = _folded(codes.flatten(1).to(torch.int16).numpy())
    coded = encode_codes(matrix, bits) if matrix.size <= MAX_CODES else b""
    fields: dict[str, Any] = {"name": name, "shape": list(tensor.shape), "dtype": "float32", "stored": "float32"}
    row = PackedTensor(**fields, coded=len(coded), bits=bits)
    return row, scale.numpy().astype("<f4").tobytes() + (b"" if coded else matrix.tobytes()), coded


def _folded(codes: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """0, 1, -1, 2, -2 ... as 0, 1, 2, 3, 4 ..."""
    return np.where(codes > 0, 2 * codes - 1, -2 * codes).astype(np.uint8)


def _unfolded(codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    whole = codes.astype(np.int16)
    return np.where(whole % 2 == 1, (whole + 1) // 2, -(whole // 2))


def _width(values: int) -> int:
    return max((values - 1).bit_length(), 1)


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
    start = len(MAGIC) + _DIGEST + 4
    length = int.from_bytes(raw[start - 4 : start], "little")
    if raw[: len(MAGIC)] != MAGIC or not 0 < length <= min(MAX_HEADER, len(raw) - start):
        raise ValueError("it does not begin like a packed model")
    if hashlib.sha256(raw[start - 4 :]).digest() != raw[len(MAGIC) : start - 4]:
        raise ValueError("its content has another SHA-256 than its beginning says")
    header = PackedHeader.model_validate(json.loads(_expand(raw[start : start + length], MAX_HEADER)))
    sizes = [_stored_bytes(one) for one in header.tensors]
    if sum(one.count for one in header.tensors) > MAX_VALUES:
        raise ValueError("it has too many values")
    body = raw[start + length :]
    if header.stream + sum(one.coded for one in header.tensors) != len(body):
        raise ValueError("it has another length than its header says")
    content = _expand(body[: header.stream], sum(sizes))
    if len(content) != sum(sizes):
        raise ValueError("it expands to less than its header says")
    found, position, coded = {}, 0, header.stream
    for one, size in zip(header.tensors, sizes, strict=True):
        found[one.name] = _tensor(one, content[position : position + size], body[coded : coded + one.coded])
        position, coded = position + size, coded + one.coded
    return found


def _expand(data: bytes, most: int) -> bytes:
    """At most this many bytes: a small file must not fill the memory."""
    decoder = lzma.LZMADecompressor(format=lzma.FORMAT_RAW, filters=_FILTERS)
    content = decoder.decompress(data, max_length=most + 1)
    if len(content) > most:
        raise ValueError("it expands to more than its header says")
    return content


def _stored_bytes(one: PackedTensor) -> int:
    if one.bits:
        return 4 * one.rows[0] + (0 if one.coded else one.count)
    if one.values:
        return 4 * one.values + (0 if one.coded else one.count)
    return one.count * torch.empty(0, dtype=_TYPES[one.stored]).element_size()


def _tensor(one: PackedTensor, content: bytes, coded: bytes) -> Tensor:
    if one.bits:
        scale = np.frombuffer(content[: 4 * one.rows[0]], dtype="<f4")
        codes = _codes(one, content[4 * one.rows[0] :], coded, one.bits).reshape(one.rows)
        flat = (_unfolded(codes) * scale[:, None]).astype(np.float32)
    elif one.values:
        values = np.frombuffer(content[: 4 * one.values], dtype="<f4")
        codes = _codes(one, content[4 * one.values :], coded, _width(one.values))
        if codes.size and int(codes.max()) >= one.values:
            raise ValueError(f"'{one.name}' has a code without a value")
        flat = values[codes]
    else:
        kinds = {"float32": "<f4", "float16": "<f2", "int64": "<i8", "uint8": "u1", "bool": "?"}
        flat = np.frombuffer(content, dtype=kinds[one.stored])
    return torch.from_numpy(flat.copy()).to(_TYPES[one.dtype]).reshape(one.shape)


def _codes(one: PackedTensor, plain: bytes, coded: bytes, bits: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if not one.coded:
        return np.frombuffer(plain, dtype=np.uint8)
    if one.count > MAX_CODES:
        raise ValueError(f"'{one.name}' is too large for its coding")
    return decode_codes(coded, one.rows, bits).reshape(-1)


def _damaged(why: str, where: str) -> ShoalError:
    return error("SH667", why, where=where)
