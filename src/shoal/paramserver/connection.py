"""A connection between servers, or of a client with a server: frames both ways, non-blocking, with bounded queues."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
from collections import deque
from collections.abc import Collection, Sequence
from typing import Literal, Protocol

from shoal.collectives.transport.greeting import Greeting
from shoal.net.errors import LinkError
from shoal.paramserver import protocol
from shoal.paramserver.protocol import HEADER_BYTES, ServerFrame

PayloadTarget = Sequence[memoryview] | Literal["skip", "hold"]
"""Buffers for a payload. `skip`: discard it. `hold`: pause the connection and ask again when it resumes."""
MAX_FRAME_BYTES = 1 << 30
MAX_UNSENT_BUFFERS = 1 << 16
"""Queued buffers with a blocked socket after which the peer counts as stuck."""
MAX_UNREAD_BYTES = 32 << 20
"""Queued reply bytes from which no further request of the client is read."""
_BUFFERS_PER_SEND = 64
_SINK_BYTES = 1 << 16
LOW_WATER_BYTES = 1 << 17
"""Payload bytes for which poll wakes up; less only if the payload ends before."""
_FD_BYTES = array.array("i", [0]).itemsize


class FrameHandler(Protocol):
    def buffer_for(self, connection: ServerConnection, frame: ServerFrame) -> PayloadTarget:
        """The buffers for the whole payload, or `skip` or `hold`."""

    def handle_frame(self, connection: ServerConnection, frame: ServerFrame) -> None:
        """Handle a frame whose payload is complete."""


class ServerConnection:
    """`peer` is the seat of the other end, which sent the `greeting` if it is the caller; it may send frames of the
    kinds that this end `accepts`. Buffers must not change until they are sent. With `backpressure`, requests are not
    read while the peer does not read its replies."""

    def __init__(
        self,
        sock: socket.socket,
        peer: int,
        *,
        accepts: Collection[int],
        backpressure: bool = False,
        greeting: Greeting | None = None,
    ) -> None:
        sock.setblocking(False)
        self.peer = peer
        self.greeting = greeting
        self._accepts = accepts
        self.backpressure = backpressure
        self.same_host = sock.family == socket.AF_UNIX
        if not self.same_host:
            with contextlib.suppress(OSError):  # cubic takes a third less CPU than bbr; some kernels lack it
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
        """The events to register with poll."""
        blocked = self.paused or self._replies_unread
        return (0 if blocked else select.POLLIN) | (select.POLLOUT if self._send_queue else 0)

    @property
    def _replies_unread(self) -> bool:
        return self.backpressure and self._unsent_bytes > MAX_UNREAD_BYTES

    # ---- send ----

    def send(self, frame: ServerFrame, *payload: memoryview | bytes, fd: int = -1) -> None:
        """Queue a frame, on one host also a descriptor, which must stay open until it is sent."""
        parts = [memoryview(part) for part in payload if len(part)]
        size = sum(map(len, parts))
        self._send_queue.append((memoryview(frame._replace(size=size).pack()), fd))
        self._send_queue.extend((part, -1) for part in parts)
        self._unsent_bytes += HEADER_BYTES + size

    @property
    def unsent_buffers(self) -> int:
        """Number of queued buffers."""
        return len(self._send_queue)

    def flush(self) -> None:
        """Send as much as the kernel accepts now."""
        try:
            while self._send_queue:
                self._mark_sent(self._send_some())
        except BlockingIOError:
            if len(self._send_queue) > MAX_UNSENT_BUFFERS:
                raise LinkError("does not read what is sent to it") from None
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

    # ---- receive ----

    def receive(self, handler: FrameHandler, *, max_frames: int = 64) -> None:
        """Receive what has arrived, at most `max_frames` frames."""
        self._receive(handler, max_frames)
        self._set_low_water(sum(map(len, self._receive_buffers)) if self._frame and self._has_target else 1)

    def _receive(self, handler: FrameHandler, max_frames: int) -> None:
        for _ in range(max_frames):
            if self._frame is None:
                if self._replies_unread or not self._fill_buffers():
                    return
                self._frame, self._has_target = protocol.unpack(self._header, self._accepts), False
            if not self._has_target and not self._prepare_buffers(handler, self._frame):
                return
            if not self._fill_buffers():
                return
            frame, self._frame, self._receive_buffers = self._frame, None, [self._header]
            handler.handle_frame(self, frame)
            self.payload = bytearray()

    def _prepare_buffers(self, handler: FrameHandler, frame: ServerFrame) -> bool:
        if frame.size > MAX_FRAME_BYTES:
            raise LinkError(f"sent {frame.size} bytes, and {MAX_FRAME_BYTES} is the most")
        target = handler.buffer_for(self, frame)
        self.paused = target == "hold"
        if target == "hold":
            return False
        if target == "skip":
            whole, rest = divmod(frame.size, _SINK_BYTES)
            self._receive_buffers = [self._sink] * whole + [self._sink[:rest]]
        else:
            self._receive_buffers = list(target)
            if (expected := sum(map(len, self._receive_buffers))) != frame.size:
                raise LinkError(f"sent {frame.size} bytes instead of {expected}")
        self._has_target = True
        return True

    def _fill_buffers(self) -> bool:
        """Receive into the next buffers; True if all are full."""
        while self._receive_buffers:
            buffer = self._receive_buffers[0]
            while buffer:
                got = self._receive_into(buffer)
                if not got:
                    self._receive_buffers[0] = buffer
                    return False
                buffer = buffer[got:]
            self._receive_buffers.pop(0)
        return True

    def _set_low_water(self, size_bytes: int) -> None:
        """Let poll report the socket as readable only with this many bytes, or when the peer is gone."""
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
            raise LinkError("sent more than one descriptor")

    def allocate_payload(self, size: int) -> list[memoryview]:
        """A new buffer for the payload, available as `payload`."""
        self.payload = bytearray(size)
        return [memoryview(self.payload)]

    def take_fd(self) -> int:
        """The descriptor that came with a frame; the caller owns it. LinkError if there is none."""
        if not self._fds:
            raise LinkError("sent no descriptor of its shared memory")
        return self._fds.pop()

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
