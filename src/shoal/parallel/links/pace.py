"""How fast bytes go through a socket of this host, with no network between: no link of its is faster."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

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


@dataclass(frozen=True)
class Pace:
    """Of TCP, one way."""

    latency_s: float
    bytes_s: float


def pace() -> Pace:
    """Measure it, within a quarter of a second or so."""
    with _echo(*_tcp_pair()) as link:
        latency_s = median(_seconds(link, _SMALL) for _ in range(50)) / 2
        large_s = median(_seconds(link, _LARGE) for _ in range(5))
    return Pace(latency_s, _LARGE / large_s)


@contextlib.contextmanager
def _echo(here: socket.socket, there: socket.socket) -> Iterator[Callable[[bytes], None]]:
    """Sends to a process at the other end, and returns when it has it."""

    def send(content: bytes) -> None:
        here.sendall(len(content).to_bytes(8, "little") + content)
        if here.recv(1) != b"!":
            raise ConnectionError("the other process is gone")

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
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return here, there


def _seconds(send: Callable[[bytes], None], size_bytes: int) -> float:
    content = bytes(size_bytes)
    start = time.perf_counter()
    send(content)
    return time.perf_counter() - start
