"""Frames of a file transfer over a blocking socket: a length and so many bytes. A frame of length 0 ends a content."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Iterator

from shoal.net.errors import LinkError, ProtocolError
from shoal.net.handshake import receive_exactly

MAX_HEADER_BYTES = 1 << 14
MAX_CHUNK_BYTES = 1 << 20
MAX_FILE_BYTES = 1 << 40
_LENGTH = struct.Struct(">I")


def send_header(sock: socket.socket, data: bytes) -> None:
    if len(data) > MAX_HEADER_BYTES:
        raise ValueError(f"the header has {len(data)} bytes; at most {MAX_HEADER_BYTES} are allowed")
    _send(sock, data)


def receive_header(sock: socket.socket) -> bytes:
    return _receive(sock, MAX_HEADER_BYTES)


def send_content(sock: socket.socket, chunks: Iterable[memoryview | bytes]) -> None:
    """Send the chunks, cut into frames, and the end."""
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        for start in range(0, len(view), MAX_CHUNK_BYTES):
            _send(sock, view[start : start + MAX_CHUNK_BYTES])
    _send(sock, b"")


def receive_content(sock: socket.socket) -> Iterator[bytes]:
    """The frames of a content until its end. LinkError if the sender is gone before; ProtocolError if it never ends."""
    left = MAX_FILE_BYTES
    while chunk := _receive(sock, MAX_CHUNK_BYTES):
        left -= len(chunk)
        if left < 0:
            raise ProtocolError("the content is too long")
        yield chunk


def receive_sized(sock: socket.socket, size_bytes: int) -> Iterator[bytes]:
    """A content whose size is known. ProtocolError if it is too long."""
    if size_bytes > MAX_FILE_BYTES:
        raise ProtocolError("the content is too long")
    while size_bytes:
        chunk = receive_exactly(sock, min(size_bytes, MAX_CHUNK_BYTES))
        size_bytes -= len(chunk)
        yield chunk


def _send(sock: socket.socket, data: bytes | memoryview) -> None:
    try:
        sock.sendall(_LENGTH.pack(len(data)))
        sock.sendall(data)
    except OSError as failure:
        raise LinkError(str(failure)) from failure


def _receive(sock: socket.socket, most: int) -> bytes:
    (size,) = _LENGTH.unpack(receive_exactly(sock, _LENGTH.size))
    if size > most:
        raise ProtocolError(f"a frame of {size} bytes; at most {most} are allowed")
    return receive_exactly(sock, size)
