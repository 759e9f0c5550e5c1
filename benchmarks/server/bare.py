"""The limit: the same bytes over blocking sockets between pairs of processes, and nothing else.

Preallocated buffers, `sendall` there and then back, `recv_into`, no update, no copy but the kernel's two.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from multiprocessing.connection import Connection

from benchmarks.server import crew
from benchmarks.server.protocol import serve, timed
from benchmarks.server.setting import Setting


def main() -> None:
    setting = Setting.from_text(sys.argv[1])
    with crew.places(2 * setting.workers, setting.mbit) as places:
        pairs = zip(places[::2], places[1::2], strict=True)
        serve(crew.rounds_of([_pair(setting, *pair) for pair in pairs]))


def _pair(setting: Setting, here: crew.Place, there: crew.Place) -> Connection:
    """A process that sends first and one that answers."""
    answering = crew.start(_answer, there, setting.size_bytes)
    return crew.start(_ask, here, answering.recv(), setting.size_bytes)


def _answer(pipe: Connection, place: crew.Place, size_bytes: int) -> None:
    listener = socket.create_server((place(), 0))
    _choose_cubic(listener)
    pipe.send(listener.getsockname())
    sock, _ = listener.accept()
    _choose_cubic(sock)
    buffer = memoryview(bytearray(size_bytes))
    while True:
        _receive(sock, buffer)
        sock.sendall(buffer)


def _ask(pipe: Connection, place: crew.Place, address: tuple[str, int], size_bytes: int) -> None:
    place()
    sock = socket.create_connection(address)
    _choose_cubic(sock)
    there, back = memoryview(bytearray(size_bytes)), memoryview(bytearray(size_bytes))

    def once() -> None:
        sock.sendall(there)
        _receive(sock, back)

    while True:
        pipe.send(timed(pipe.recv(), once))


def _receive(sock: socket.socket, into: memoryview) -> None:
    while into:
        got = sock.recv_into(into)
        if not got:
            sys.exit(0)
        into = into[got:]


def _choose_cubic(sock: socket.socket) -> None:
    """Where it can be had: bbr, a common default, paces itself and is slower on a loopback."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


if __name__ == "__main__":
    main()
