"""Bytes from one end to another until the first of them ends."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable

CHUNK_BYTES = 1 << 16


def relay_pipes(sock: socket.socket, *, source: int, sink: int) -> None:
    """Send what comes from the pipe `source`, and write what arrives to the pipe `sink`. Returns when the other side of
    the connection sends no more. `source` is never closed here: its reader may wait on it until the process ends."""
    threading.Thread(target=_send_all, args=(sock, source), name="shoal-relay", daemon=True).start()
    copy_until_end(lambda: sock.recv(CHUNK_BYTES), lambda data: _write_all(sink, data))


def copy_until_end(read: Callable[[], bytes], write: Callable[[bytes], object]) -> None:
    """Returns at the end of what is read, or when either end is gone."""
    with contextlib.suppress(OSError, ValueError):
        while data := read():
            write(data)


def finish_sending(sock: socket.socket) -> None:
    """The other side reads an end; it may still send."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)


def break_off(sock: socket.socket) -> None:
    """Wake up all who read or write it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _send_all(sock: socket.socket, source: int) -> None:
    copy_until_end(lambda: os.read(source, CHUNK_BYTES), sock.sendall)
    finish_sending(sock)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
