"""Finds the sockets that gloo opens, to shut them down and to count the bytes they send.

gloo can neither wake a waiting thread nor report how much it sends. The operating system can do both.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

_SENT = slice(120, 128)  # in the kernel's tcp_info: acknowledged bytes


class GlooSockets:
    """The sockets opened since this object was made. `shut_down` may be called by any thread."""

    def __init__(self) -> None:
        self._sockets_before = _sockets()
        self._frozen: dict[int, str] | None = None
        self._is_open = True

    def freeze(self) -> None:
        """Add no sockets that are opened later."""
        self._frozen = self._new_sockets()

    def shut_down(self) -> None:
        """End every wait on these sockets with an error within milliseconds, here and on the peers."""
        self._is_open = False
        for sock in self._connected():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def sent_bytes(self) -> int:
        """Bytes sent so far; 0 if the operating system does not report it."""
        total = 0
        for sock in self._connected() if self._is_open else ():
            with contextlib.suppress(OSError):
                total += int.from_bytes(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)[_SENT], "little")
        return total

    def _connected(self) -> Iterator[socket.socket]:
        """The connected sockets. gloo aborts the process if a listening socket is shut down."""
        for number, name in (self._new_sockets() if self._frozen is None else self._frozen).items():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{number}") == name:
                    with socket.socket(fileno=os.dup(number)) as sock:
                        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                            yield sock

    def _new_sockets(self) -> dict[int, str]:
        return {number: name for number, name in _sockets().items() if self._sockets_before.get(number) != name}


def _sockets() -> dict[int, str]:
    """This process's sockets by descriptor, with their inode names, because descriptors are reused."""
    sockets = {}
    with contextlib.suppress(OSError):
        for number in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                name = os.readlink(f"/proc/self/fd/{number}")
                if name.startswith("socket:"):
                    sockets[number] = name
    return sockets
