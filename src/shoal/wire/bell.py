"""A bell: wakes a thread that waits in select()."""

from __future__ import annotations

import contextlib
import socket


class Bell:
    """Readable from `ring` until `clear`. Any thread may ring; many rings are one; a closed bell is silent."""

    def __init__(self) -> None:
        # Sockets and not a pipe: a ring that comes after `close` must not end in a file that got the same number.
        self._heard, self._pulled = socket.socketpair()
        self._heard.setblocking(False)
        self._pulled.setblocking(False)

    def fileno(self) -> int:
        return self._heard.fileno()

    def ring(self) -> None:
        with contextlib.suppress(OSError):  # full: it is ringing already
            self._pulled.send(b"!")

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._heard.recv(4096)) == 4096:
                pass

    def close(self) -> None:
        self._heard.close()
        self._pulled.close()
