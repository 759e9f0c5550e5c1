"""The connections that torch opens by itself: so that who waits in one can be woken, and what they carry is counted.

gloo has no means to wake a waiting thread, and tells nobody how much it sends. The system knows both.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

_SENT = slice(120, 128)  # of the system's tcp_info: bytes that the other side has taken


class GlooSockets:
    """Sockets that came into being since this object did. `cut` may be called by any thread."""

    def __init__(self) -> None:
        self._sockets_before = _sockets()
        self._frozen: dict[int, str] | None = None
        self._is_open = True

    def freeze(self) -> None:
        """No more belong to it from now on."""
        self._frozen = self._new_sockets()

    def shut_down(self) -> None:
        """Whoever waits for something to come through gets an error within milliseconds, here and at the other end."""
        self._is_open = False
        for sock in self._connected():
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def sent_bytes(self) -> int:
        """So far; 0 where the system does not tell."""
        total = 0
        for sock in self._connected() if self._is_open else ():
            with contextlib.suppress(OSError):
                total += int.from_bytes(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)[_SENT], "little")
        return total

    def _connected(self) -> Iterator[socket.socket]:
        """The connected ones. gloo ends the process if one that listens is shut down."""
        for number, name in (self._new_sockets() if self._frozen is None else self._frozen).items():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{number}") == name:
                    with socket.socket(fileno=os.dup(number)) as sock:
                        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                            yield sock

    def _new_sockets(self) -> dict[int, str]:
        return {number: name for number, name in _sockets().items() if self._sockets_before.get(number) != name}


def _sockets() -> dict[int, str]:
    """This process's, by descriptor, with the names that the system has for them: a number may be used again."""
    found = {}
    with contextlib.suppress(OSError):
        for number in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                name = os.readlink(f"/proc/self/fd/{number}")
                if name.startswith("socket:"):
                    found[number] = name
    return found
