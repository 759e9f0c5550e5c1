"""Keep the wire busy without training traffic: measures what the emulation of a slow link costs the workers.

Real network cards move bytes by themselves. Here the kernel does, packet by packet, on the cores that also train.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

from benchmarks.links.hosts import ADDRESSES

PORT = 29_517
PIECE_BYTES = 1 << 16
PATIENCE_S = 20.0


def keep_busy(rank: int) -> None:
    """Send as much as the wire takes, both ways, in a separate process that ends with this one."""
    parent = os.getpid()
    if os.fork() == 0:
        with contextlib.suppress(OSError), connected(rank) as sock:
            for act in (_send, _receive):
                threading.Thread(target=act, args=(sock,), daemon=True).start()
            while os.getppid() == parent:
                time.sleep(0.2)
        os._exit(0)


def connected(rank: int) -> socket.socket:
    """Send to the other host."""
    if rank == 0:
        with socket.create_server((ADDRESSES[0], PORT)) as server:
            server.settimeout(PATIENCE_S)
            return server.accept()[0]
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((ADDRESSES[0], PORT), timeout=PATIENCE_S)
        if time.monotonic() > deadline:
            raise TimeoutError("the other host does not listen")
        time.sleep(0.05)


def _send(sock: socket.socket) -> None:
    piece = bytes(PIECE_BYTES)
    while True:
        sock.sendall(piece)


def _receive(sock: socket.socket) -> None:
    room = bytearray(PIECE_BYTES)
    while sock.recv_into(room):
        pass
