"""The wire format of `checkpoint.state_format` for numpy arrays: what clients and servers send as a state.

    magic · size and CRC-32 of the header · header (JSON) · the arrays' bytes, in the header's order · CRC-32 of these

It exists twice because clients have no torch.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.net.errors import LinkError

State = Any
CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_DTYPES = {code: name for name, code in CODES.items()}
_MAGIC = b"SHOALST\x01"
_START = struct.Struct("<8sQI")
_END = struct.Struct("<I")


def pack(state: State) -> bytes:
    arrays: dict[str, NDArray[Any]] = {}
    skeleton = _encode(state, "", arrays)
    table = [[name, CODES[array.dtype.name], list(array.shape)] for name, array in arrays.items()]
    header = json.dumps([skeleton, table], separators=(",", ":")).encode("ascii")
    content = b"".join(array.tobytes() for array in arrays.values())
    return b"".join([_START.pack(_MAGIC, len(header), zlib.crc32(header)), header, content, _crc(content)])


def unpack(packed: bytes) -> State:
    """LinkError for anything that is not a packed state."""
    try:
        magic, size, crc = _START.unpack_from(packed)
        header, content = packed[_START.size : _START.size + size], packed[_START.size + size : -_END.size]
        if magic != _MAGIC or zlib.crc32(header) != crc or _crc(content) != packed[-_END.size :]:
            raise ValueError("wrong checksum")
        skeleton, table = json.loads(header)
        return _decode(skeleton, _arrays(table, content))
    except (ValueError, KeyError, TypeError, struct.error, RecursionError, OverflowError) as problem:
        raise LinkError(f"sent a malformed state: {problem}") from problem


def _crc(content: bytes) -> bytes:
    return _END.pack(zlib.crc32(content))


def _arrays(table: Any, content: bytes) -> dict[str, NDArray[Any]]:
    arrays, start = {}, 0
    for name, code, shape in table:
        dtype = np.dtype(_DTYPES[code])
        if not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError("an array has no such shape")
        count = math.prod(shape)
        arrays[name] = np.frombuffer(content, dtype, count, start).reshape(shape)
        start += count * dtype.itemsize
    return arrays


def _encode(node: Any, path: str, arrays: dict[str, NDArray[Any]]) -> Any:
    if isinstance(node, np.ndarray):
        arrays[path] = node
        return {"tensor": path}
    if isinstance(node, dict):
        return {"dict": [[key, _encode(value, f"{path}/{key}", arrays)] for key, value in node.items()]}
    if isinstance(node, list):
        return [_encode(value, f"{path}/{i}", arrays) for i, value in enumerate(node)]
    return node


def _decode(node: Any, arrays: dict[str, NDArray[Any]]) -> Any:
    if isinstance(node, list):
        return [_decode(item, arrays) for item in node]
    if not isinstance(node, dict):
        return node
    ((tag, value),) = node.items()
    if tag == "tensor":
        return arrays[value]
    if tag == "dict":
        return {key: _decode(item, arrays) for key, item in value}
    if tag == "float":
        return float(value)
    if tag == "tuple":
        return [_decode(item, arrays) for item in value]
    raise ValueError(f"unknown tag {tag!r}")
