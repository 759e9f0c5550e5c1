"""Messages over a blocking socket: a request is a content (see `net.file_transfer`), words with machines are lines."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from pydantic import TypeAdapter

from shoal.jobs.queue.network.messages import encode, parse
from shoal.net.errors import ProtocolError
from shoal.net.file_transfer import receive_content, send_content
from shoal.spec.base import Spec

T = TypeVar("T")
MAX_REQUEST_BYTES = 4 << 20
MAX_LINE_BYTES = 1 << 12
MAX_ANSWER_BYTES = 256 << 20
"""An answer lists all jobs of the queue."""


def send(sock: socket.socket, message: Spec) -> None:
    send_content(sock, [encode(message)])


def receive(sock: socket.socket, adapter: TypeAdapter[T], *, most: int = MAX_REQUEST_BYTES) -> T:
    """LinkError if the sender is gone; ProtocolError if the message is malformed or too long."""
    data = bytearray()
    for chunk in receive_content(sock):
        data += chunk
        if len(data) > most:
            raise ProtocolError("the message is too long")
    return parse(adapter, bytes(data))


def read_lines(
    sock: socket.socket, *, pause_s: float, silence_s: float, on_pause: Callable[[], None]
) -> Iterator[bytes]:
    """Lines until the other side is gone or has said nothing for too long. `on_pause` is called when nothing came for a
    while. ProtocolError if a line is too long."""
    sock.settimeout(pause_s)
    heard_s, rest = time.monotonic(), b""
    while time.monotonic() - heard_s < silence_s:
        try:
            data = sock.recv(MAX_LINE_BYTES)
        except TimeoutError:
            on_pause()
            continue
        except OSError:
            return
        if not data:
            return
        heard_s = time.monotonic()
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
        if len(rest) > MAX_LINE_BYTES:
            raise ProtocolError("a line is too long")
