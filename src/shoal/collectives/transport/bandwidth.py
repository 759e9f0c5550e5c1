"""Measures latency and bandwidth: of TCP within this host, and of a link to another host."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

from shoal.net.errors import LinkError

_ECHO = """
import socket, sys
with socket.socket(fileno=int(sys.argv[1])) as peer:
    room = bytearray(1 << 20)
    while size := int.from_bytes(peer.recv(8, socket.MSG_WAITALL), "little"):
        while size:
            size -= peer.recv_into(room, min(size, len(room)))
        peer.sendall(b"!")
"""
_SMALL, _LARGE = 8, 16 << 20
_LATENCY_SAMPLES = 20
_TRANSFER_S = 0.1
"""Seconds that the largest transfer over a link should take; the size doubles until it does."""
_REQUEST = struct.Struct("<cq")
IDLE_S = 10.0
"""Seconds without a byte after which the other end of a measurement counts as gone."""


@dataclass(frozen=True)
class LoopbackSpeed:
    """TCP within this host, one way."""

    latency_s: float
    bytes_s: float


@dataclass(frozen=True)
class LinkSpeed:
    """A link to another host, seen from the worker that measured it."""

    latency_s: float
    send_bytes_s: float
    receive_bytes_s: float


def measure_link(sock: socket.socket) -> LinkSpeed:
    """Measure a link whose other end runs `answer_link_test`. Takes a few hundred milliseconds at any speed. LinkError
    if the peer disconnects."""
    try:
        _disable_nagle(sock)
        there_and_back_s = median(_timed_request(sock, b"s", 1) for _ in range(_LATENCY_SAMPLES))
        send_s, receive_s = (_per_byte_s(sock, kind, there_and_back_s) for kind in (b"s", b"r"))
    except OSError as failure:
        raise LinkError(f"the link could not be measured: {failure}") from failure
    return LinkSpeed(there_and_back_s / 2, 1 / send_s, 1 / receive_s)


def answer_link_test(sock: socket.socket) -> None:
    """Receive and send the bytes that the measuring worker asks for, until it disconnects."""
    buffer = bytearray(1 << 18)
    with contextlib.suppress(OSError):
        sock.settimeout(IDLE_S)
        _disable_nagle(sock)
        while head := _receive_exactly(sock, _REQUEST.size):
            kind, size = _REQUEST.unpack(head)
            if not 0 < size <= _LARGE:
                return
            if kind == b"s":
                _drain(sock, size, buffer)
                sock.sendall(b"!")
            else:
                _send_bytes(sock, size, buffer)


def _per_byte_s(sock: socket.socket, kind: bytes, round_trip_s: float) -> float:
    size = 1 << 16
    while (taken_s := _timed_request(sock, kind, size)) < _TRANSFER_S and size < _LARGE:
        size *= 2
    return max(taken_s - round_trip_s, taken_s / 10) / size


def _timed_request(sock: socket.socket, kind: bytes, size: int) -> float:
    buffer = bytearray(min(size, 1 << 18))
    start = time.perf_counter()
    sock.sendall(_REQUEST.pack(kind, size))
    if kind == b"s":
        _send_bytes(sock, size, buffer)
        _drain(sock, 1, buffer)
    else:
        _drain(sock, size, buffer)
    return time.perf_counter() - start


def _send_bytes(sock: socket.socket, size: int, buffer: bytearray) -> None:
    while size:
        piece = memoryview(buffer)[: min(size, len(buffer))]
        sock.sendall(piece)
        size -= len(piece)


def _drain(sock: socket.socket, size: int, buffer: bytearray) -> None:
    while size:
        if not (got := sock.recv_into(buffer, min(size, len(buffer)))):
            raise ConnectionError("the peer disconnected")
        size -= got


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    """Empty if the peer disconnects."""
    got = b""
    while len(got) < size:
        if not (more := sock.recv(size - len(got))):
            return b""
        got += more
    return got


def measure_loopback() -> LoopbackSpeed:
    """Measure TCP within this host; takes about a quarter of a second."""
    with _echo_process(*_tcp_pair()) as link:
        latency_s = median(_timed_send(link, _SMALL) for _ in range(50)) / 2
        large_s = median(_timed_send(link, _LARGE) for _ in range(5))
    return LoopbackSpeed(latency_s, _LARGE / large_s)


@contextlib.contextmanager
def _echo_process(here: socket.socket, there: socket.socket) -> Iterator[Callable[[bytes], None]]:
    """Yields a function that sends to another process and returns when that process has received everything."""

    def send(content: bytes) -> None:
        here.sendall(len(content).to_bytes(8, "little") + content)
        if here.recv(1) != b"!":
            raise ConnectionError("the echo process is gone")

    command = [sys.executable, "-I", "-S", "-c", _ECHO, str(there.fileno())]
    with here, there, subprocess.Popen(command, pass_fds=[there.fileno()]):
        there.close()
        send(bytes(_SMALL))
        yield send
        here.shutdown(socket.SHUT_WR)


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    for one in (here, there):
        _disable_nagle(one)
    return here, there


def _disable_nagle(sock: socket.socket) -> None:
    """Without this a small packet waits for the acknowledgement of the last one, many times the latency."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _timed_send(send: Callable[[bytes], None], size_bytes: int) -> float:
    content = bytes(size_bytes)
    start = time.perf_counter()
    send(content)
    return time.perf_counter() - start
