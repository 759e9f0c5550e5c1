"""The connection to one peer of a view: sends and receives frames without blocking."""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections.abc import Callable, Sequence

from shoal.collectives.transport import frames
from shoal.collectives.transport.frames import FRAME_BYTES, PeerFrame
from shoal.net.errors import LinkError

LOW_WATER_BYTES = 1 << 17  # wake up only for this much: on a slow link packets arrive one by one


class PeerError(LinkError):
    """The view cannot continue because of the worker in this seat."""

    def __init__(self, seat: int, what: str) -> None:
        super().__init__(f"seat {seat} {what}")
        self.seat = seat


BuffersFor = Callable[["PeerLink", PeerFrame], Sequence[memoryview]]
"""Returns the buffers for the payload of an expected frame."""


class PeerLink:
    """Owned by the loop's thread; `shut_down` may come from any thread."""

    def __init__(self, seat: int, sock: socket.socket, *, view: int) -> None:
        self.seat = seat
        self.same_host = sock.family == socket.AF_UNIX
        self.bytes_sent = 0
        self.bytes_received = 0
        self.unposted_bytes = 0
        self.frame_received = False
        self.payload_received_bytes = 0
        self._sock = sock
        self._view = view
        self._outgoing: list[memoryview] = []
        self._fd_out = -1
        self._head = memoryview(bytearray(FRAME_BYTES))
        self._incoming: list[memoryview] = []
        self._fd_in = -1
        self._expected = (0, 0, 0, 0)
        self._low_water = 1
        sock.setblocking(False)
        if not self.same_host:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(OSError):  # cubic takes a third less CPU than bbr; some kernels lack it
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")

    def fileno(self) -> int:
        return self._sock.fileno()

    # --- send

    def post(self, frame: PeerFrame, payload: Sequence[memoryview] = (), *, fd: int = -1, later_bytes: int = 0) -> None:
        """Queue a frame and (same host only) a descriptor. The last `later_bytes` of the payload follow by
        `post_rest`."""
        self._outgoing += [memoryview(frame.pack()), *(part for part in payload if part)]
        self._fd_out = fd
        self.unposted_bytes = later_bytes

    def post_rest(self, part: memoryview) -> None:
        """Queue the next part of the payload that was left for later."""
        if part:
            self._outgoing.append(part)
            self.unposted_bytes -= len(part)

    @property
    def sending(self) -> bool:
        return bool(self._outgoing)

    def send(self) -> None:
        """Send as much as the kernel accepts now."""
        try:
            while self._outgoing:
                self._sent(self._sock.sendmsg(self._outgoing, self._ancillary()))
        except BlockingIOError:
            pass
        except OSError as failure:
            raise PeerError(self.seat, f"was lost: {failure.strerror}") from failure

    def _ancillary(self) -> list[tuple[int, int, array.array[int]]]:
        return [] if self._fd_out < 0 else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self._fd_out]))]

    def _sent(self, count: int) -> None:
        self.bytes_sent += count
        self._fd_out = -1
        while self._outgoing and count >= len(self._outgoing[0]):
            count -= len(self._outgoing.pop(0))
        if count:
            self._outgoing[0] = self._outgoing[0][count:]

    # --- receive

    def expect(self, kind: int, step: int) -> None:
        """The next frame must be this one; any other is an error."""
        self._expected = (kind, self._view, step, self.seat)
        self._incoming = [self._head]
        self.frame_received = False
        self.payload_received_bytes = 0

    @property
    def receiving(self) -> bool:
        return bool(self._incoming)

    def receive(self, buffers_for: BuffersFor) -> None:
        """Receive the bytes that have arrived."""
        while self._incoming:
            buffer = self._incoming[0]
            got = self._receive_into(buffer)
            self.payload_received_bytes += got
            self.bytes_received += got
            if got < len(buffer):
                self._incoming[0] = buffer[got:]
                break
            self._incoming.pop(0)
            if not self.frame_received:
                self.frame_received = True
                self.payload_received_bytes = 0  # the header does not count
                frame = self._parse_head()
                self._incoming = [part for part in self._payload_buffers(buffers_for, frame) if part]
        missing_bytes = sum(map(len, self._incoming)) if self.frame_received else 0
        self._set_low_water(max(1, min(LOW_WATER_BYTES, missing_bytes)))

    def _set_low_water(self, size_bytes: int) -> None:
        """Let poll report the socket as readable only with this many bytes, or when the peer is gone."""
        if size_bytes != self._low_water and not self.same_host:
            self._low_water = size_bytes
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size_bytes)

    def _receive_into(self, buffer: memoryview) -> int:
        try:
            if self._expected[0] == frames.SETUP and self.same_host:
                got = self._receive_with_fd(buffer)
            else:
                got = self._sock.recv_into(buffer)
        except BlockingIOError:
            return 0
        except OSError as failure:
            raise PeerError(self.seat, f"was lost: {failure.strerror}") from failure
        if not got:
            raise PeerError(self.seat, "was lost: it closed the connection")
        return got

    def _receive_with_fd(self, buffer: memoryview) -> int:
        got, ancillary, _, _ = self._sock.recvmsg_into([buffer], socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                for fd in array.array("i", content[: len(content) // 4 * 4]):
                    self._drop_fd()
                    self._fd_in = fd
        return got

    def take_fd(self) -> int:
        """The descriptor that came with the frame; the caller owns it. LinkError if there is none."""
        fd, self._fd_in = self._fd_in, -1
        if fd < 0:
            raise LinkError("sent no descriptor of its shared memory")
        return fd

    def _parse_head(self) -> PeerFrame:
        try:
            frame = frames.unpack(self._head)
        except LinkError as failure:
            raise PeerError(self.seat, str(failure)) from failure
        if frame.kind == frames.LEFT and (frame.view, frame.seat) == (self._view, self.seat):
            raise PeerError(frame.step, f"was lost, as seat {self.seat} says")
        if frame[:4] != self._expected:
            raise PeerError(self.seat, f"sent {tuple(frame[:4])} instead of {self._expected} (kind, view, step, seat)")
        return frame

    def _payload_buffers(self, buffers_for: BuffersFor, frame: PeerFrame) -> Sequence[memoryview]:
        try:
            return buffers_for(self, frame)
        except PeerError:
            raise
        except LinkError as failure:
            raise PeerError(self.seat, str(failure)) from failure

    # --- close

    def disconnect(self, frame: PeerFrame) -> None:
        """Send a last frame, unless another is half sent, and close this direction."""
        with contextlib.suppress(OSError):
            if not self._outgoing and not self.unposted_bytes:
                self._sock.send(frame.pack())
            self._sock.shutdown(socket.SHUT_WR)

    def shut_down(self) -> None:
        """Close both directions, so that waits on this connection end at once on both sides."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _drop_fd(self) -> None:
        if self._fd_in >= 0:
            os.close(self._fd_in)
            self._fd_in = -1

    def close(self) -> None:
        self._drop_fd()
        self._sock.close()
