"""Files in the run's directory for a worker that cannot open it: the driver reads and writes them on request."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, cast

from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from shoal.net.errors import LinkError
from shoal.net.file_transfer import receive_header, receive_sized, send_content, send_header
from shoal.spec.remote.file_requests import Area, FileAnswer, FileRequest, Operation

MAX_IDLE_S = 60.0
SPOOL_BYTES = 64 << 20
"""A file up to this size is kept in memory while it is read, a larger one in a temporary file."""
ANSWER_TIMEOUT_S = 120.0
MAX_LISTING_BYTES = 256 << 20
_LISTING = TypeAdapter(dict[str, NonNegativeInt])


class DriverConnections:
    """Connections to the driver for files, for any number of threads. `connect` opens one."""

    def __init__(self, connect: Callable[[], socket.socket]) -> None:
        self._connect = connect
        self._idle: list[tuple[socket.socket, float]] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def borrow(self) -> Iterator[socket.socket]:
        """A connection of one's own. It is kept for others, unless the block raises a LinkError."""
        sock = self._take()
        try:
            yield sock
        except BaseException:
            sock.close()
            raise
        with self._lock:
            self._idle.append((sock, time.monotonic()))

    def _take(self) -> socket.socket:
        with self._lock:
            while self._idle:
                sock, since_s = self._idle.pop()
                if time.monotonic() - since_s < MAX_IDLE_S:
                    return sock
                sock.close()
        sock = self._connect()
        sock.settimeout(ANSWER_TIMEOUT_S)
        return sock

    def close(self) -> None:
        with self._lock:
            while self._idle:
                self._idle.pop()[0].close()


class DriverFiles:
    """See CheckpointFiles. One area of the run's directory. The driver writes atomically, and holds the locks."""

    has_locks = True

    def __init__(self, connections: DriverConnections, area: Area) -> None:
        self.where = f"{area} of the run"
        self._connections = connections
        self._area: Area = area

    def open(self, path: str) -> BinaryIO:
        with self._connections.borrow() as sock:
            answer = self._ask(sock, self._request("read", path))
            file = cast(BinaryIO, tempfile.SpooledTemporaryFile(SPOOL_BYTES))  # noqa: SIM115  # the caller closes it
            for chunk in _link_errors(lambda: receive_sized(sock, answer.size_bytes)):
                file.write(chunk)
        file.seek(0)
        return file

    def write(self, path: str, chunks: Iterable[memoryview | bytes]) -> None:
        self._send("write", path, chunks)

    def append(self, path: str, data: bytes) -> None:
        """Add to the end of the file."""
        self._send("append", path, [data])

    def remove(self, path: str) -> None:
        with self._connections.borrow() as sock:
            self._ask(sock, self._request("remove", path))

    def sizes(self, under: str = "") -> dict[str, int]:
        with self._connections.borrow() as sock:
            answer = self._ask(sock, self._request("sizes", under))
            if answer.size_bytes > MAX_LISTING_BYTES:
                raise _gone(ValueError("its list of files is too long"))
            content = b"".join(_link_errors(lambda: receive_sized(sock, answer.size_bytes)))
            try:
                return _LISTING.validate_json(content)
            except ValidationError as failure:
                raise _gone(failure) from failure

    @contextlib.contextmanager
    def save_lock(self) -> Iterator[None]:
        with self._locked(exclusive=False):
            yield

    @contextlib.contextmanager
    def sweep_lock(self) -> Iterator[bool]:
        with self._locked(exclusive=True) as taken:
            yield taken

    def is_stale(self, path: str) -> bool:
        return True

    @contextlib.contextmanager
    def _locked(self, *, exclusive: bool) -> Iterator[bool]:
        """The driver holds the lock as long as this connection lives."""
        request = FileRequest(operation="lock", area=self._area, exclusive=exclusive)
        with contextlib.ExitStack() as stack:
            sock = stack.enter_context(self._connections.borrow())
            taken = self._ask(sock, request).taken
            try:
                yield taken
            finally:
                self._ask(sock, self._request("unlock", ""))

    def _request(self, operation: Operation, path: str) -> FileRequest:
        try:
            return FileRequest(operation=operation, area=self._area, path=path)
        except ValidationError as failure:
            raise OSError(errno.EINVAL, "not a path inside the run", path) from failure

    def _send(self, operation: Operation, path: str, chunks: Iterable[memoryview | bytes]) -> None:
        request = self._request(operation, path)
        with self._connections.borrow() as sock:
            try:
                send_header(sock, request.model_dump_json().encode())
                send_content(sock, chunks)
            except LinkError as failure:
                raise _gone(failure) from failure
            self._answer(sock, path)

    def _ask(self, sock: socket.socket, request: FileRequest) -> FileAnswer:
        try:
            send_header(sock, request.model_dump_json().encode())
        except LinkError as failure:
            raise _gone(failure) from failure
        return self._answer(sock, request.path)

    def _answer(self, sock: socket.socket, path: str) -> FileAnswer:
        try:
            answer = FileAnswer.model_validate_json(receive_header(sock))
        except (LinkError, ValidationError) as failure:
            raise _gone(failure) from failure
        if answer.number:
            raise OSError(answer.number, answer.message or os.strerror(answer.number), path)
        return answer


def _link_errors(make: Callable[[], Iterator[bytes]]) -> Iterator[bytes]:
    try:
        yield from make()
    except LinkError as failure:
        raise _gone(failure) from failure


def _gone(failure: Exception) -> OSError:
    return ConnectionError(errno.ECONNRESET, f"the driver cannot be asked for files: {failure}")
