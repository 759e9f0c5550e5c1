"""Mutual authentication by token: each side answers the other's challenge with an HMAC, and the token is never sent."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable

from shoal.net.errors import LinkError, TlsError, TokenError

MAGIC = b"SHOAL\x01"
TLS_RECORD_PREFIX = b"\x16\x03"
TLS_ALERT = b"\x15\x03\x03\x00\x02\x02\x46"
"""A TLS alert (protocol version). TLS peers send it to plain connections; plain listeners send it to TLS clients."""
MAX_HELLO_BYTES = 48 << 10
"""A hello may contain a chunk table."""
TIMEOUT_S = 3.0
_ALERT_DRAIN_S = 0.2
_NONCE_BYTES = 16
_PROOF_BYTES = 32
_SIZE = struct.Struct("<H")


Token = str | Callable[[bytes], str]
"""One token for all clients, or the token of the client that says a hello. A caller that names nobody gets a token
that nobody knows, so that it learns nothing."""


def new_token() -> str:
    return secrets.token_hex(16)


def client_handshake(sock: socket.socket, token: str, hello: bytes) -> None:
    """The client's half: send `hello`, prove knowledge of the token, and verify the server's proof."""
    if len(hello) > MAX_HELLO_BYTES:
        raise LinkError(f"the hello has {len(hello)} bytes; at most {MAX_HELLO_BYTES} are allowed")
    until = time.monotonic() + TIMEOUT_S
    head = MAGIC + os.urandom(_NONCE_BYTES) + _SIZE.pack(len(hello)) + hello
    sock.sendall(head)
    answer = _receive_before(until, sock, len(TLS_ALERT))
    if answer == TLS_ALERT:
        raise TlsError("the other side uses TLS, but this process does not")
    answer += _receive_before(until, sock, _NONCE_BYTES + _PROOF_BYTES - len(TLS_ALERT))
    nonce, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, b"answer", head, nonce)):
        raise TokenError("the other side does not know the token")
    sock.sendall(_proof(token, b"caller", head, nonce))
    if _receive_before(until, sock, 1) != b"+":
        raise LinkError("the other side refused the connection")


def server_handshake(sock: socket.socket, token: Token) -> bytes:
    """The server's half. Returns the client's hello. LinkError for unknown clients and port scanners, from which it
    reads only a few bytes. `token` may depend on the hello."""
    until = time.monotonic() + TIMEOUT_S
    head = _receive_before(until, sock, len(MAGIC) + _NONCE_BYTES + _SIZE.size)
    if head.startswith(TLS_RECORD_PREFIX):
        sock.sendall(TLS_ALERT)
        rest = max(0, 5 + int.from_bytes(head[3:5]) - len(head))  # closing with unread bytes would discard the alert
        _receive_before(time.monotonic() + _ALERT_DRAIN_S, sock, rest)
    if not head.startswith(MAGIC):
        raise LinkError("the client does not speak the protocol")
    (size,) = _SIZE.unpack(head[-_SIZE.size :])
    if size > MAX_HELLO_BYTES:
        raise LinkError(f"the hello has {size} bytes; at most {MAX_HELLO_BYTES} are allowed")
    hello = _receive_before(until, sock, size)
    known = token if isinstance(token, str) else token(hello)
    nonce = os.urandom(_NONCE_BYTES)
    sock.sendall(nonce + _proof(known, b"answer", head + hello, nonce))
    proof = _receive_before(until, sock, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(known, b"caller", head + hello, nonce)):
        raise LinkError("the client does not know the token")
    sock.sendall(b"+")
    return hello


def _proof(token: str, role: bytes, head: bytes, nonce: bytes) -> bytes:
    return hmac.digest(token.encode(), role + head + nonce, hashlib.sha256)


def receive_exactly(sock: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes. LinkError if the peer closes before."""
    buffer = bytearray(size)
    receive_exactly_into(sock, memoryview(buffer))
    return bytes(buffer)


def receive_exactly_into(sock: socket.socket, view: memoryview) -> None:
    while view:
        view = view[_receive_some(sock, view) :]


def _receive_before(deadline_s: float, sock: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes before the deadline. Without a deadline a slow sender could block the thread for hours."""
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise LinkError("the other side is too slow")
        sock.settimeout(left_s)
        view = view[_receive_some(sock, view) :]
    return bytes(buffer)


def _receive_some(sock: socket.socket, view: memoryview) -> int:
    try:
        got = sock.recv_into(view)
    except OSError as failure:
        raise LinkError(str(failure)) from failure
    if not got:
        raise LinkError("the other side closed the connection")
    return got
