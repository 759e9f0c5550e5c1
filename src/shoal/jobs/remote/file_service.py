"""The driver's side of files for workers without the run's directory.

Only a process that the driver gave a seat, and that still has it, is served: one that was declared dead cannot write
any more, even if it lives on behind a broken network. It can reach four areas and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.checkpoint.files import CheckpointFiles, LocalFiles, open_files
from shoal.net.errors import LinkError, ProtocolError
from shoal.net.file_transfer import MAX_CHUNK_BYTES, receive_content, receive_header, send_header
from shoal.spec.remote.file_requests import Area, FileAnswer, FileRequest, FilesHello, parse_request
from shoal.spec.run_paths import RunPaths

MAX_CONNECTIONS_PER_SEAT = 8
IDLE_TIMEOUT_S = 600.0
"""A silent connection is closed after so long; a save that holds a lock may take a while."""
MAX_APPEND_BYTES = 16 << 20


class HeldLock(contextlib.ExitStack):
    """The lock of a connection. It may hold one: each costs a descriptor, and two could wait for each other."""

    _is_held = False

    def take(self, lock: AbstractContextManager[bool | None]) -> bool | None:
        if self._is_held:
            raise ProtocolError("it holds a lock already")
        self._is_held = True
        return self.enter_context(lock)

    def close(self) -> None:
        self._is_held = False
        super().close()


class FileService:
    """Serves each connection in the thread that accepted it. Everything else belongs to the driver's thread.

    `holds_key(name, key)` checks the proof of a seat. `code` is the directory of archives.
    """

    def __init__(self, paths: RunPaths, *, checkpoints: str, code: Path, holds_key: Callable[[str, str], bool]) -> None:
        self._files: dict[Area, CheckpointFiles] = {
            "checkpoints": open_files(checkpoints),
            "model": LocalFiles(str(paths.model)),
            "code": LocalFiles(str(code)),
        }
        self._trace = paths.trace
        self._holds_key = holds_key
        self._admitted: set[int] = set()
        self._connections: dict[socket.socket, int] = {}
        self._lock = threading.Lock()
        self._closed = False

    def admit(self, seat: int) -> None:
        """From now on serve the process in this seat."""
        with self._lock:
            self._admitted.add(seat)

    def dismiss(self, seat: int) -> None:
        """Close the connections of this seat. It is never served again."""
        with self._lock:
            self._admitted.discard(seat)
            self._close_where(lambda owner: owner == seat)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._close_where(lambda owner: True)

    def _close_where(self, is_meant: Callable[[int], bool]) -> None:
        for sock, owner in self._connections.items():
            if is_meant(owner):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def serve(self, sock: socket.socket, greeting: dict[str, Any]) -> None:
        """Serve a connection until it ends. ProtocolError if it breaks the rules: it counts as refused."""
        seat = self._authenticate(greeting)
        with self._lock:
            crowd = sum(owner == seat for owner in self._connections.values())
            if self._closed or crowd >= MAX_CONNECTIONS_PER_SEAT:
                raise ProtocolError("too many connections for files")
            self._connections[sock] = seat
        try:
            sock.settimeout(IDLE_TIMEOUT_S)
            with HeldLock() as lock:
                while True:
                    self._serve_one(sock, seat, lock)
        except ProtocolError:
            raise
        except LinkError:
            return
        finally:
            with self._lock:
                del self._connections[sock]
            sock.close()

    def _authenticate(self, greeting: dict[str, Any]) -> int:
        try:
            hello = FilesHello.model_validate(greeting)
        except ValidationError as failure:
            raise ProtocolError("the greeting is malformed") from failure
        if not self._holds_key(f"{hello.process}-{hello.seat}", hello.key):
            raise ProtocolError(f"seat {hello.seat} is not its seat")
        return hello.seat

    def _serve_one(self, sock: socket.socket, seat: int, lock: HeldLock) -> None:
        try:
            request = parse_request(receive_header(sock))
        except ValueError as failure:
            raise ProtocolError(str(failure)) from failure
        with self._lock:
            if seat not in self._admitted:
                raise ProtocolError(f"the process in seat {seat} does not belong to the run")
        content = receive_content(sock) if request.operation in ("write", "append") else iter(())
        try:
            answer, chunks = self._carry_out(request, content, lock)
        except LinkError:
            raise
        except OSError as failure:
            for _ in content:  # the rest of what it sends: it listens only afterwards
                pass
            answer, chunks = _failed(failure), iter(())
        send_header(sock, answer.model_dump_json().encode())
        _send_raw(sock, chunks)

    def _carry_out(
        self, request: FileRequest, content: Iterator[bytes], lock: HeldLock
    ) -> tuple[FileAnswer, Iterator[bytes]]:
        if request.operation == "append":
            _append(self._trace, content)
            return FileAnswer(), iter(())
        files = self._files[request.area]
        match request.operation:
            case "read":
                return _read(files, request.path)
            case "write":
                files.write(request.path, content)
            case "remove":
                files.remove(request.path)
            case "sizes":
                listing = json.dumps(files.sizes(request.path)).encode()
                return FileAnswer(size_bytes=len(listing)), iter([listing])
            case "lock" if request.exclusive:
                return FileAnswer(taken=bool(lock.take(files.sweep_lock()))), iter(())
            case "lock":
                lock.take(files.save_lock())
            case "unlock":
                lock.close()
        return FileAnswer(), iter(())


def _read(files: CheckpointFiles, path: str) -> tuple[FileAnswer, Iterator[bytes]]:
    file = files.open(path)
    size_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)

    def chunks() -> Iterator[bytes]:
        left = size_bytes
        with file:
            while left and (chunk := file.read(min(left, MAX_CHUNK_BYTES))):
                left -= len(chunk)
                yield chunk
        if left:
            raise LinkError("the file became shorter")

    return FileAnswer(size_bytes=size_bytes), chunks()


def _append(path: Path, content: Iterator[bytes]) -> None:
    data = bytearray()
    for chunk in content:
        data += chunk
        if len(data) > MAX_APPEND_BYTES:
            raise ProtocolError("it appends too much at once")
    with path.open("ab") as file:
        file.write(data)


def _send_raw(sock: socket.socket, chunks: Iterator[bytes]) -> None:
    try:
        for chunk in chunks:
            sock.sendall(chunk)
    except OSError as failure:
        raise LinkError(str(failure)) from failure


def _failed(failure: OSError) -> FileAnswer:
    number = failure.errno if failure.errno and 0 < failure.errno < 4096 else errno.EIO
    return FileAnswer(number=number, message=(failure.strerror or str(failure))[:1000])
