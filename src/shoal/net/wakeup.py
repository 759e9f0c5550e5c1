"""A bell: wakes a thread that waits in select()."""

from __future__ import annotations

import contextlib
import socket


class Wakeup:
    """Readable from `ring` until `clear`. Any thread may ring; many rings are one; a closed bell is silent."""

    def __init__(self) -> None:
        # Sockets and not a pipe: a ring that comes after `close` must not end in a file that got the same number.
        self._read_end, self._write_end = socket.socketpair()
        self._read_end.setblocking(False)
        self._write_end.setblocking(False)

    def fileno(self) -> int:
        return self._read_end.fileno()

    def notify(self) -> None:
        with contextlib.suppress(OSError):  # full: it is ringing already
            self._write_end.send(b"!")

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._read_end.recv(4096)) == 4096:
                pass

    def close(self) -> None:
        self._read_end.close()
        self._write_end.close()
