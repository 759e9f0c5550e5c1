"""One peer of a view: frames out, frames in, without ever blocking."""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections.abc import Callable, Sequence

from shoal.collectives.transport import frames
from shoal.collectives.transport.frames import FRAME_BYTES, PeerFrame
from shoal.net.errors import LinkError

LOW_WATER_BYTES = 1 << 17  # less is not worth waking up for: on a slow link packets come one by one


class PeerError(LinkError):
    """The view cannot go on because of this seat."""

    def __init__(self, seat: int, what: str) -> None:
        super().__init__(f"seat {seat} {what}")
        self.seat = seat


BuffersFor = Callable[["PeerLink", PeerFrame], Sequence[memoryview]]
"""Given a frame that is what was expected, says where its payload goes."""


class PeerLink:
    """Owned by the loop's thread; `shut` may come from any."""

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
            with contextlib.suppress(OSError):  # a third less CPU than bbr; where there is none, so be it
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")

    def fileno(self) -> int:
        return self._sock.fileno()

    # --- out

    def post(self, frame: PeerFrame, payload: Sequence[memoryview] = (), *, fd: int = -1, later_bytes: int = 0) -> None:
        """To be sent, and with it (same host only) a descriptor. So many bytes of the payload come `later`."""
        self._outgoing += [memoryview(frame.pack()), *(part for part in payload if part)]
        self._fd_out = fd
        self.unposted_bytes = later_bytes

    def post_rest(self, part: memoryview) -> None:
        """The next part of the payload that was to come later."""
        if part:
            self._outgoing.append(part)
            self.unposted_bytes -= len(part)

    @property
    def sending(self) -> bool:
        return bool(self._outgoing)

    def send(self) -> None:
        """As much as the kernel takes now."""
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

    # --- in

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
        """Take what has arrived."""
        while self._incoming:
            place = self._incoming[0]
            got = self._receive_into(place)
            self.payload_received_bytes += got
            self.bytes_received += got
            if got < len(place):
                self._incoming[0] = place[got:]
                break
            self._incoming.pop(0)
            if not self.frame_received:
                self.frame_received = True
                self.payload_received_bytes = 0  # from now on, of the payload
                frame = self._parse_head()
                self._incoming = [part for part in self._payload_buffers(buffers_for, frame) if part]
        still = sum(map(len, self._incoming)) if self.frame_received else 0
        self._set_low_water(max(1, min(LOW_WATER_BYTES, still)))

    def _set_low_water(self, size_bytes: int) -> None:
        """Poll says that there is something to receive when so much has come, or when the peer is gone."""
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
        """The descriptor that came with the frame; it is the caller's now. LinkError if there was none."""
        fd, self._fd_in = self._fd_in, -1
        if fd < 0:
            raise LinkError("shares no memory")
        return fd

    def _parse_head(self) -> PeerFrame:
        try:
            frame = frames.unpack(self._head)
        except LinkError as failure:
            raise PeerError(self.seat, str(failure)) from failure
        if frame.kind == frames.LEFT and (frame.view, frame.seat) == (self._view, self.seat):
            raise PeerError(frame.step, f"was lost, as seat {self.seat} says")
        if frame[:4] != self._expected:
            raise PeerError(
                self.seat, f"sent {tuple(frame[:4])} where {self._expected} belongs (kind, view, step, seat)"
            )
        return frame

    def _payload_buffers(self, buffers_for: BuffersFor, frame: PeerFrame) -> Sequence[memoryview]:
        try:
            return buffers_for(self, frame)
        except PeerError:
            raise
        except LinkError as failure:
            raise PeerError(self.seat, str(failure)) from failure

    # --- the end

    def disconnect(self, frame: PeerFrame) -> None:
        """A last word, if it does not fall into the middle of another, and nothing after it."""
        with contextlib.suppress(OSError):
            if not self._outgoing and not self.unposted_bytes:
                self._sock.send(frame.pack())
            self._sock.shutdown(socket.SHUT_WR)

    def shut_down(self) -> None:
        """Whoever waits for this peer, here or there, learns at once that it is over."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _drop_fd(self) -> None:
        if self._fd_in >= 0:
            os.close(self._fd_in)
            self._fd_in = -1

    def close(self) -> None:
        self._drop_fd()
        self._sock.close()
