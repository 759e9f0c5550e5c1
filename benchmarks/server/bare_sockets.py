"""The limit: the same bytes over blocking sockets between pairs of processes, and nothing else.

Preallocated buffers, `sendall` there and then back, `recv_into`, no update, no copy but the kernel's two. The way
`both` has bytes go back as soon as they come: what wires allow that carry both directions at once.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import sys
import threading
from multiprocessing.connection import Connection

from benchmarks.server import processes
from benchmarks.server.protocol import serve, timed
from benchmarks.server.setting import Setting


def main() -> None:
    setting = Setting.from_text(sys.argv[1])
    with processes.hosts_for(2 * setting.workers, setting.mbit) as places:
        pairs = zip(places[::2], places[1::2], strict=True)
        serve(processes.lockstep_rounds([_pair(setting, *pair) for pair in pairs]))


def _pair(setting: Setting, client_host: processes.EnterHost, server_host: processes.EnterHost) -> Connection:
    """A pair of processes: one sends first, the other answers."""
    both = setting.way == "both"
    answering = processes.start(_echo if both else _reply_whole, server_host, setting.size_bytes)
    return processes.start(_client, client_host, answering.recv(), setting.size_bytes, both)


def _accepted(pipe: Connection, enter_host: processes.EnterHost) -> socket.socket:
    listener = socket.create_server((enter_host(), 0))
    _choose_cubic(listener)
    pipe.send(listener.getsockname())
    sock, _ = listener.accept()
    _choose_cubic(sock)
    return sock


def _echo(pipe: Connection, enter_host: processes.EnterHost, size_bytes: int) -> None:
    """One thread receives, another sends back what has arrived."""
    sock = _accepted(pipe, enter_host)
    buffer = memoryview(bytearray(size_bytes))
    came: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def send_back() -> None:
        while True:
            start, stop = came.get()
            sock.sendall(buffer[start:stop])

    threading.Thread(target=send_back, daemon=True).start()
    at = 0
    while got := sock.recv_into(buffer[at:]):
        came.put((at, at + got))
        at = (at + got) % size_bytes


def _reply_whole(pipe: Connection, enter_host: processes.EnterHost, size_bytes: int) -> None:
    sock = _accepted(pipe, enter_host)
    buffer = memoryview(bytearray(size_bytes))
    while True:
        _receive(sock, buffer)
        sock.sendall(buffer)


def _client(
    pipe: Connection, enter_host: processes.EnterHost, address: tuple[str, int], size_bytes: int, both: bool
) -> None:
    enter_host()
    sock = socket.create_connection(address)
    _choose_cubic(sock)
    there, back = memoryview(bytearray(size_bytes)), memoryview(bytearray(size_bytes))

    def once() -> None:
        if both:
            sending = threading.Thread(target=sock.sendall, args=[there])
            sending.start()
            _receive(sock, back)
            sending.join()
        else:
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
    """Use cubic if available: bbr, a common default, paces itself and is slower on loopback."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")


if __name__ == "__main__":
    main()
