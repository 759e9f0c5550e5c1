"""Wakes a thread that waits in select()."""

from __future__ import annotations

import contextlib
import socket


class Wakeup:
    """Readable from `notify` until `clear`. Any thread may `notify`; several calls count as one; after `close` they do
    nothing."""

    def __init__(self) -> None:
        # Sockets, not a pipe: a `notify` after `close` must not write to a file that got the same descriptor.
        self._read_end, self._write_end = socket.socketpair()
        self._read_end.setblocking(False)
        self._write_end.setblocking(False)

    def fileno(self) -> int:
        return self._read_end.fileno()

    def notify(self) -> None:
        with contextlib.suppress(OSError):  # full: it is readable already
            self._write_end.send(b"!")

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._read_end.recv(4096)) == 4096:
                pass

    def close(self) -> None:
        self._read_end.close()
        self._write_end.close()
