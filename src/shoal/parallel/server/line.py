"""One connection of a server, or to one: frames in both directions, nothing blocks, and nothing grows without bound."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
from collections import deque
from collections.abc import Sequence
from typing import Literal, Protocol

from shoal.parallel.server import frames
from shoal.parallel.server.frames import FRAME_BYTES, Frame
from shoal.wire.handshake import LinkError

Place = Sequence[memoryview] | Literal["skip", "hold"]
MOST_FRAME_BYTES = 1 << 30
MOST_UNSENT_PARTS = 1 << 16
MOST_UNREAD_BYTES = 32 << 20
_PARTS_AT_ONCE = 64
_SINK_BYTES = 1 << 16
LOW_WATER_BYTES = 1 << 17
"""Of a payload, less is not worth waking up for, until all of it is there."""
_FD = array.array("i", [0]).itemsize


class Handler(Protocol):
    def place(self, line: Line, frame: Frame) -> Place:
        """Where the payload goes, all of it. `skip`: it is not wanted. `hold`: ask again when the line goes on."""

    def got(self, line: Line, frame: Frame) -> None:
        """Frame and payload are there."""


class Line:
    """`peer` is whom it leads to. What is sent must not change until it is gone. One who `asks` is not heard further
    while he does not read the answers."""

    def __init__(self, sock: socket.socket, peer: int, *, asks: bool = False) -> None:
        sock.setblocking(False)
        self.peer = peer
        self.asks = asks
        self.same_host = sock.family == socket.AF_UNIX
        if not self.same_host:
            with contextlib.suppress(OSError):  # a third less CPU than bbr; where there is none, so be it
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
        self.held = False
        self.bytes_in = 0
        self.bytes_out = 0
        self.said = bytearray()
        self._sock = sock
        self._out: deque[tuple[memoryview, int]] = deque()
        self._unsent_bytes = 0
        self._raw = memoryview(bytearray(FRAME_BYTES))
        self._in: list[memoryview] = [self._raw]
        self._frame: Frame | None = None
        self._placed = False
        self._sink = memoryview(bytearray(_SINK_BYTES))
        self._fds: list[int] = []
        self._low_water = 1

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def wishes(self) -> int:
        """For poll()."""
        deaf = self.held or self._crowded
        return (0 if deaf else select.POLLIN) | (select.POLLOUT if self._out else 0)

    @property
    def _crowded(self) -> bool:
        return self.asks and self._unsent_bytes > MOST_UNREAD_BYTES

    # ---- out ----

    def send(self, frame: Frame, *payload: memoryview | bytes, fd: int = -1) -> None:
        """With a descriptor, where both are on one host; it must stay open until it is gone."""
        parts = [memoryview(part) for part in payload if len(part)]
        size = sum(map(len, parts))
        self._out.append((memoryview(frame._replace(size=size).pack()), fd))
        self._out.extend((part, -1) for part in parts)
        self._unsent_bytes += FRAME_BYTES + size

    @property
    def unsent(self) -> int:
        """How many parts wait."""
        return len(self._out)

    def flush(self) -> None:
        """As much as the kernel takes now."""
        try:
            while self._out:
                self._gone(self._send_some())
        except BlockingIOError:
            if len(self._out) > MOST_UNSENT_PARTS:
                raise LinkError("does not read what it is sent") from None
        except OSError as failure:
            raise LinkError(f"was lost: {failure.strerror}") from failure

    def _send_some(self) -> int:
        first, fd = self._out[0]
        if fd >= 0:
            sent = self._sock.sendmsg([first], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
            self._out[0] = (first, -1)
            return sent
        parts = []
        for i in range(min(len(self._out), _PARTS_AT_ONCE)):
            part, fd = self._out[i]
            if fd >= 0:
                break
            parts.append(part)
        return self._sock.sendmsg(parts)

    def _gone(self, count: int) -> None:
        self.bytes_out += count
        self._unsent_bytes -= count
        while self._out and count >= len(self._out[0][0]):
            count -= len(self._out.popleft()[0])
        if count:
            self._out[0] = (self._out[0][0][count:], self._out[0][1])

    # ---- in ----

    def receive(self, handler: Handler, *, most: int = 64) -> None:
        """Take what has arrived, at most so many frames."""
        self._receive(handler, most)
        self._wake_me_at(sum(map(len, self._in)) if self._frame and self._placed else 1)

    def _receive(self, handler: Handler, most: int) -> None:
        for _ in range(most):
            if self._frame is None:
                if self._crowded or not self._filled():
                    return
                self._frame, self._placed = frames.unpack(self._raw), False
            if not self._placed and not self._find_place(handler, self._frame):
                return
            if not self._filled():
                return
            frame, self._frame, self._in = self._frame, None, [self._raw]
            handler.got(self, frame)
            self.said = bytearray()

    def _find_place(self, handler: Handler, frame: Frame) -> bool:
        if frame.size > MOST_FRAME_BYTES:
            raise LinkError(f"sends {frame.size} bytes, and {MOST_FRAME_BYTES} is the most")
        place = handler.place(self, frame)
        self.held = place == "hold"
        if place == "hold":
            return False
        if place == "skip":
            whole, rest = divmod(frame.size, _SINK_BYTES)
            self._in = [self._sink] * whole + [self._sink[:rest]]
        else:
            self._in = list(place)
            if (room := sum(map(len, self._in))) != frame.size:
                raise LinkError(f"sends {frame.size} bytes where {room} belong")
        self._placed = True
        return True

    def _filled(self) -> bool:
        """Is everything there that was expected next?"""
        while self._in:
            place = self._in[0]
            while place:
                got = self._take(place)
                if not got:
                    self._in[0] = place
                    return False
                place = place[got:]
            self._in.pop(0)
        return True

    def _wake_me_at(self, size_bytes: int) -> None:
        """Poll tells of it when so much has come, or when the other end is gone."""
        size_bytes = min(size_bytes, LOW_WATER_BYTES)
        if size_bytes != self._low_water and not self.same_host:
            self._low_water = size_bytes
            with contextlib.suppress(OSError):  # closed meanwhile
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)

    def _take(self, place: memoryview) -> int:
        try:
            if self.same_host and self._frame is None:
                got, ancillary, _, _ = self._sock.recvmsg_into([place], socket.CMSG_SPACE(_FD), socket.MSG_CMSG_CLOEXEC)
                self._keep_fds(ancillary)
            else:
                got = self._sock.recv_into(place)
        except BlockingIOError:
            return 0
        except OSError as failure:
            raise LinkError(f"was lost: {failure.strerror}") from failure
        if not got:
            raise LinkError("was lost: it closed the connection")
        self.bytes_in += got
        return got

    def _keep_fds(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._fds += array.array("i", content[: len(content) // _FD * _FD])
        if len(self._fds) > 1:
            raise LinkError("sends more descriptors than were asked for")

    def room(self, size: int) -> list[memoryview]:
        """A place of its own for the payload: `said`."""
        self.said = bytearray(size)
        return [memoryview(self.said)]

    def take_fd(self) -> int:
        """The descriptor that came with a frame; the caller's now. LinkError if there was none."""
        if not self._fds:
            raise LinkError("shares no memory")
        return self._fds.pop()

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
