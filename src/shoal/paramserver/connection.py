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

from shoal.net.errors import LinkError
from shoal.paramserver import protocol
from shoal.paramserver.protocol import HEADER_BYTES, ServerFrame

PayloadTarget = Sequence[memoryview] | Literal["skip", "hold"]
MAX_FRAME_BYTES = 1 << 30
MAX_UNSENT_BUFFERS = 1 << 16
MAX_UNREAD_BYTES = 32 << 20
_BUFFERS_PER_SEND = 64
_SINK_BYTES = 1 << 16
LOW_WATER_BYTES = 1 << 17
"""Of a payload, less is not worth waking up for, until all of it is there."""
_FD_BYTES = array.array("i", [0]).itemsize


class FrameHandler(Protocol):
    def buffer_for(self, connection: ServerConnection, frame: ServerFrame) -> PayloadTarget:
        """Where the payload goes, all of it. `skip`: it is not wanted. `hold`: ask again when the line goes on."""

    def handle_frame(self, connection: ServerConnection, frame: ServerFrame) -> None:
        """Frame and payload are there."""


class ServerConnection:
    """`peer` is whom it leads to. What is sent must not change until it is gone. One who `asks` is not heard further
    while he does not read the answers."""

    def __init__(self, sock: socket.socket, peer: int, *, backpressure: bool = False) -> None:
        sock.setblocking(False)
        self.peer = peer
        self.backpressure = backpressure
        self.same_host = sock.family == socket.AF_UNIX
        if not self.same_host:
            with contextlib.suppress(OSError):  # a third less CPU than bbr; where there is none, so be it
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
        self.paused = False
        self.bytes_in = 0
        self.bytes_out = 0
        self.payload = bytearray()
        self._sock = sock
        self._send_queue: deque[tuple[memoryview, int]] = deque()
        self._unsent_bytes = 0
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._receive_buffers: list[memoryview] = [self._header]
        self._frame: ServerFrame | None = None
        self._has_target = False
        self._sink = memoryview(bytearray(_SINK_BYTES))
        self._fds: list[int] = []
        self._low_water = 1

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def poll_events(self) -> int:
        """For poll()."""
        deaf = self.paused or self._replies_unread
        return (0 if deaf else select.POLLIN) | (select.POLLOUT if self._send_queue else 0)

    @property
    def _replies_unread(self) -> bool:
        return self.backpressure and self._unsent_bytes > MAX_UNREAD_BYTES

    # ---- out ----

    def send(self, frame: ServerFrame, *payload: memoryview | bytes, fd: int = -1) -> None:
        """With a descriptor, where both are on one host; it must stay open until it is gone."""
        parts = [memoryview(part) for part in payload if len(part)]
        size = sum(map(len, parts))
        self._send_queue.append((memoryview(frame._replace(size=size).pack()), fd))
        self._send_queue.extend((part, -1) for part in parts)
        self._unsent_bytes += HEADER_BYTES + size

    @property
    def unsent_buffers(self) -> int:
        """How many parts wait."""
        return len(self._send_queue)

    def flush(self) -> None:
        """As much as the kernel takes now."""
        try:
            while self._send_queue:
                self._mark_sent(self._send_some())
        except BlockingIOError:
            if len(self._send_queue) > MAX_UNSENT_BUFFERS:
                raise LinkError("does not read what it is sent") from None
        except OSError as failure:
            raise LinkError(f"was lost: {failure.strerror}") from failure

    def _send_some(self) -> int:
        first, fd = self._send_queue[0]
        if fd >= 0:
            sent = self._sock.sendmsg([first], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
            self._send_queue[0] = (first, -1)
            return sent
        parts = []
        for i in range(min(len(self._send_queue), _BUFFERS_PER_SEND)):
            part, fd = self._send_queue[i]
            if fd >= 0:
                break
            parts.append(part)
        return self._sock.sendmsg(parts)

    def _mark_sent(self, count: int) -> None:
        self.bytes_out += count
        self._unsent_bytes -= count
        while self._send_queue and count >= len(self._send_queue[0][0]):
            count -= len(self._send_queue.popleft()[0])
        if count:
            self._send_queue[0] = (self._send_queue[0][0][count:], self._send_queue[0][1])

    # ---- in ----

    def receive(self, handler: FrameHandler, *, max_frames: int = 64) -> None:
        """Take what has arrived, at most so many frames."""
        self._receive(handler, max_frames)
        self._set_low_water(sum(map(len, self._receive_buffers)) if self._frame and self._has_target else 1)

    def _receive(self, handler: FrameHandler, max_frames: int) -> None:
        for _ in range(max_frames):
            if self._frame is None:
                if self._replies_unread or not self._fill_buffers():
                    return
                self._frame, self._has_target = protocol.unpack(self._header), False
            if not self._has_target and not self._prepare_buffers(handler, self._frame):
                return
            if not self._fill_buffers():
                return
            frame, self._frame, self._receive_buffers = self._frame, None, [self._header]
            handler.handle_frame(self, frame)
            self.payload = bytearray()

    def _prepare_buffers(self, handler: FrameHandler, frame: ServerFrame) -> bool:
        if frame.size > MAX_FRAME_BYTES:
            raise LinkError(f"sends {frame.size} bytes, and {MAX_FRAME_BYTES} is the most")
        place = handler.buffer_for(self, frame)
        self.paused = place == "hold"
        if place == "hold":
            return False
        if place == "skip":
            whole, rest = divmod(frame.size, _SINK_BYTES)
            self._receive_buffers = [self._sink] * whole + [self._sink[:rest]]
        else:
            self._receive_buffers = list(place)
            if (room := sum(map(len, self._receive_buffers))) != frame.size:
                raise LinkError(f"sends {frame.size} bytes where {room} belong")
        self._has_target = True
        return True

    def _fill_buffers(self) -> bool:
        """Is everything there that was expected next?"""
        while self._receive_buffers:
            place = self._receive_buffers[0]
            while place:
                got = self._receive_into(place)
                if not got:
                    self._receive_buffers[0] = place
                    return False
                place = place[got:]
            self._receive_buffers.pop(0)
        return True

    def _set_low_water(self, size_bytes: int) -> None:
        """Poll tells of it when so much has come, or when the other end is gone."""
        size_bytes = min(size_bytes, LOW_WATER_BYTES)
        if size_bytes != self._low_water and not self.same_host:
            self._low_water = size_bytes
            with contextlib.suppress(OSError):  # closed meanwhile
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)

    def _receive_into(self, buffer: memoryview) -> int:
        try:
            if self.same_host and self._frame is None:
                got, ancillary, _, _ = self._sock.recvmsg_into(
                    [buffer], socket.CMSG_SPACE(_FD_BYTES), socket.MSG_CMSG_CLOEXEC
                )
                self._collect_fds(ancillary)
            else:
                got = self._sock.recv_into(buffer)
        except BlockingIOError:
            return 0
        except OSError as failure:
            raise LinkError(f"was lost: {failure.strerror}") from failure
        if not got:
            raise LinkError("was lost: it closed the connection")
        self.bytes_in += got
        return got

    def _collect_fds(self, ancillary: list[tuple[int, int, bytes]]) -> None:
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._fds += array.array("i", content[: len(content) // _FD_BYTES * _FD_BYTES])
        if len(self._fds) > 1:
            raise LinkError("sends more descriptors than were asked for")

    def allocate_payload(self, size: int) -> list[memoryview]:
        """A place of its own for the payload: `said`."""
        self.payload = bytearray(size)
        return [memoryview(self.payload)]

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
