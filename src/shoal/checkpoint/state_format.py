"""Send a state from one process to another: exact, without pickle and without a file.

    magic · size and CRC-32 of the header · header (JSON) · the tensors' bytes, in the header's order · CRC-32 of these

The header is the state's skeleton with the name, dtype and shape of each tensor. Sizes are checked before memory is
allocated. The checksums detect accidents; the handshake decides whether the peer is trusted.
"""

from __future__ import annotations

import json
import math
import reprlib
import socket
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.checkpoint.state_tree import Skeleton, State, flatten, unflatten
from shoal.checkpoint.tensor_bytes import DTYPE_CODES, DTYPES, bytes_of
from shoal.errors import CheckpointError
from shoal.net.errors import LinkError
from shoal.net.handshake import receive_exactly_into

MAX_HEADER_BYTES = 64 << 20

_MAGIC = b"SHOALST\x01"
_START = struct.Struct("<8sQI")
_END = struct.Struct("<I")
_CHUNK_BYTES = 1 << 20
_MAX_CHUNKS_PER_SEND = 256

_NamedTensorSpec = tuple[str, torch.dtype, tuple[int, ...]]
_Fill = Callable[[memoryview], None]
"""Fills a buffer completely with the next bytes, or raises LinkError."""


def send_state(sock: socket.socket, state: State) -> int:
    """Send a state, which must not change meanwhile. Returns the number of bytes. LinkError if the peer is gone.

    SH506 for a state that cannot be saved, before anything is sent.
    """
    tensors, skeleton = flatten(state)
    start = _message_head(tensors, skeleton)
    try:
        return sum(_send_all(sock, batch) for batch in _batches(_message_chunks(start, tensors)))
    except OSError as failure:
        raise LinkError(str(failure)) from failure


def receive_state(sock: socket.socket, *, max_bytes: int) -> State:
    """The state that `send_state` sent, in host memory. The tensors belong to the caller.

    LinkError if the bytes are malformed, truncated, corrupt, or more than `max_bytes`.
    """
    return _read_state(lambda view: receive_exactly_into(sock, view), max_bytes=max_bytes)


def pack_state(state: State) -> bytes:
    """The bytes that `send_state` sends."""
    tensors, skeleton = flatten(state)
    return b"".join(_message_chunks(_message_head(tensors, skeleton), tensors))


def unpack_state(content: bytes) -> State:
    """The state that `pack_state` packed. LinkError for anything else."""
    rest = memoryview(content)

    def fill(view: memoryview) -> None:
        nonlocal rest
        if len(rest) < len(view):
            raise LinkError("the state ends too early")
        view[:], rest = rest[: len(view)], rest[len(view) :]

    state = _read_state(fill, max_bytes=len(content))
    if rest:
        raise LinkError(f"{len(rest)} bytes follow the state")
    return state


# ---- out ----


def _message_head(tensors: Mapping[str, Tensor], skeleton: Skeleton) -> bytes:
    table = [[name, DTYPE_CODES[tensor.dtype], list(tensor.shape)] for name, tensor in tensors.items()]
    header = json.dumps([skeleton, table], separators=(",", ":")).encode("ascii")
    return _START.pack(_MAGIC, len(header), zlib.crc32(header)) + header


def _message_chunks(start: bytes, tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """The whole message in small chunks: the peer receives one while the next is checksummed.

    A tensor on a device is copied to the host just before it is sent.
    """
    yield from _chunks(memoryview(start))
    crc = 0
    for tensor in tensors.values():
        for piece in _chunks(bytes_of(tensor)):
            crc = zlib.crc32(piece, crc)
            yield piece
    yield memoryview(_END.pack(crc))


def _chunks(view: memoryview) -> Iterator[memoryview]:
    return (view[begin : begin + _CHUNK_BYTES] for begin in range(0, len(view), _CHUNK_BYTES))


def _batches(pieces: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Group chunks, so that one call sends many: a model has hundreds of small tensors."""
    batch: list[memoryview] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece)
        if size >= _CHUNK_BYTES or len(batch) == _MAX_CHUNKS_PER_SEND:
            yield batch
            batch, size = [], 0
    yield batch


def _send_all(sock: socket.socket, batch: list[memoryview]) -> int:
    total = sum(map(len, batch))
    while batch:
        sent = sock.sendmsg(batch)
        while batch and sent >= len(batch[0]):
            sent -= len(batch.pop(0))
        if sent:
            batch[0] = batch[0][sent:]
    return total


# ---- in ----


def _read_state(fill: _Fill, *, max_bytes: int) -> State:
    skeleton, specs, max_bytes = _read_header(fill, max_bytes=max_bytes)
    size_bytes = sum(dtype.itemsize * math.prod(shape) for _, dtype, shape in specs)
    if size_bytes > max_bytes:
        raise LinkError(f"the peer sends tensors of {size_bytes} bytes; at most {max_bytes} are allowed")
    tensors, crc = {}, 0
    for name, dtype, shape in specs:
        tensors[name] = _empty(dtype, shape)
        for piece in _chunks(bytes_of(tensors[name])):
            fill(piece)
            crc = zlib.crc32(piece, crc)
    if _read_exactly(fill, _END.size) != _END.pack(crc):
        raise LinkError("the tensors do not match their checksum")
    try:
        return unflatten(tensors, skeleton)
    except CheckpointError as damage:
        raise LinkError(damage.message[:200]) from None


def _read_header(fill: _Fill, *, max_bytes: int) -> tuple[Skeleton, list[_NamedTensorSpec], int]:
    """The skeleton, the specs of the tensors that follow, and their total size in bytes."""
    magic, size, crc = _START.unpack(_read_exactly(fill, _START.size))
    if magic != _MAGIC:
        raise LinkError("the peer does not send a state")
    if size > min(MAX_HEADER_BYTES, max_bytes):
        raise LinkError(f"the header of the state has {size} bytes")
    text = _read_exactly(fill, size)
    if zlib.crc32(text) != crc:
        raise LinkError("the header does not match its checksum")
    try:
        skeleton, table = json.loads(text)
        return skeleton, [_parse_spec(*row) for row in table], max_bytes - size
    except (ValueError, TypeError, RecursionError) as problem:
        raise LinkError(f"the header is damaged: {problem}") from None


def _parse_spec(name: Any, code: Any, shape: Any) -> _NamedTensorSpec:
    if not isinstance(name, str) or not isinstance(code, str) or code not in DTYPES:
        raise ValueError(f"a tensor {reprlib.repr(name)} of dtype {reprlib.repr(code)}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"a tensor of the shape {reprlib.repr(shape)}")
    return name, DTYPES[code], tuple(shape)


def _read_exactly(fill: _Fill, size: int) -> bytearray:
    content = bytearray(size)
    fill(memoryview(content))
    return content


def _empty(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    try:
        return torch.empty(shape, dtype=dtype)
    except (RuntimeError, TypeError, ValueError, OverflowError) as problem:
        raise LinkError(f"no tensor has the shape {reprlib.repr(shape)}") from problem
