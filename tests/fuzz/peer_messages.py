"""Messages to the ports of servers and workers by one that knows the token: valid ones, and what becomes of them.

All is drawn from one `random.Random`, so a seed repeats it.
"""

import contextlib
import copy
import fcntl
import json
import os
import random
import socket
import struct

from shoal.net import handshake
from shoal.net.errors import LinkError
from shoal.net.listener import connect
from shoal.paramserver import protocol
from shoal.paramserver.protocol import ServerFrame
from shoal.spec.chunk_table import build_pieces

NUMBERS = [0, 1, 2, 3, 7, 255, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 53, 1 << 62, (1 << 64) - 1]
FLOATS = [0.0, 1.0, -1.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan")]
VALUES = [None, True, -1, 0, 1 << 70, 10**400, 0.5, float("nan"), "", "x", "\ud800", [], [1], {}, {"a": 1}, [[[]]]]
PURPOSES = ["mesh", "state", "follow", "memory", "pace", "push", "chain"]
KINDS = sorted(protocol.CLIENT_KINDS | protocol.SERVER_KINDS | protocol.PREDECESSOR_KINDS | protocol.SUCCESSOR_KINDS)
STRANGER = 900
MOST_UNANSWERED = 100
"""Greetings that may go unanswered on a machine that is busy. A port that is gone answers none."""
BOMBS = [b"[" * 30_000, b'{"a":' * 10_000, b'{"a":[' + b"[]," * 50_000 + b"[]]}", b"\xff\xfe{}", b"null", b"{}", b""]


class Foe:
    """Sends messages to a port, each time over a new connection. `sent` counts those that the port's machine has taken:
    greetings that were answered, and what followed them as far as nobody hung up before."""

    def __init__(self, seed, token):
        self.rng = random.Random(seed)
        self.token = token
        self.sent = 0
        self._unanswered = 0

    def send(self, address, hello, messages, *, fd=-1, waits=False):
        """A greeting and what follows it, perhaps cut off. With `waits`, return when the other end has closed."""
        tcp = self.rng.random() < 0.3
        family = socket.AF_INET if tcp else socket.AF_UNIX
        raw = b"".join(messages)
        if self.rng.random() < 0.1:
            raw = raw[: self.rng.randint(0, len(raw))]
        to = (address.host, address.port) if tcp else "\0" + address.unix
        try:
            sock = connect(family, to, self.token, hello[: handshake.MAX_HELLO_BYTES])
        except LinkError as failure:
            self._unanswered += 1
            if self._unanswered > MOST_UNANSWERED:
                raise AssertionError(f"the port does not answer any more: {failure}") from failure
            return
        self.sent += 1
        with contextlib.suppress(OSError), sock:
            sock.settimeout(0.2)  # one whose frame is held for a later table is not read
            if fd >= 0 and not tcp and raw:
                socket.send_fds(sock, [raw[:1]], [fd])
                raw = raw[1:]
            sock.sendall(raw)
            self.sent += len(messages) if raw else 0
            sock.shutdown(socket.SHUT_WR)
            while waits and sock.recv(1 << 16):
                pass

    def greeting(self, purpose, *, seat, view, spoilt=0.3):
        fields = {"purpose": purpose, "seat": seat, "view": view, "caller": "ab", "connection": self.rng.randint(0, 9)}
        if purpose == "memory":
            fields |= {"step": self.rng.choice([0, 1, 1 << 40]), "lanes": [self.rng.randint(0, 3)]}
        if self.rng.random() < spoilt:
            return self.spoil(fields)
        return json.dumps(fields).encode()

    def spoil(self, value):
        """The JSON of a value with something else in one or two places, or no JSON."""
        if self.rng.random() < 0.1:
            return self.rng.choice([*BOMBS, self.rng.randbytes(self.rng.randint(0, 60))])
        value = copy.deepcopy(value)
        for _ in range(self.rng.randint(1, 2)):
            container = self.rng.choice(list(_containers(value)) or [{"none": None}])
            key = self.rng.choice(list(container) if isinstance(container, dict) else range(len(container)))
            if self.rng.random() < 0.25 and isinstance(container, dict):
                del container[key]
            else:
                container[key] = copy.deepcopy(self.rng.choice(VALUES))
        return json.dumps(value).encode(errors="surrogatepass")

    def descriptor(self):
        """Something to send along; the caller closes it."""
        kind = self.rng.randint(0, 3)
        if kind == 0:
            return os.open("/dev/null", os.O_RDONLY)
        fd = os.memfd_create("fuzz", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, self.rng.choice([0, 1, 4096, 1 << 20]))
        if kind == 1:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return fd


def _containers(value):
    if isinstance(value, dict | list) and value:
        yield value
        for part in value.values() if isinstance(value, dict) else value:
            yield from _containers(part)


class ServerFrames:
    """Frames that a server of this chunk table knows, as a member could send them, and spoilt ones. `enter` has the
    fields of one with which a member enters a view."""

    def __init__(self, foe, table, *, view, model, enter, states):
        self.foe, self.rng, self.table, self.view, self.model = foe, foe.rng, table, view, model
        self.pieces, self.enter, self.states = build_pieces(table), enter, states

    def some(self):
        return [self.one() for _ in range(self.rng.randint(0, 5))]

    def one(self):
        rng = self.rng
        if rng.random() < 0.1:
            return rng.randbytes(rng.choice([1, 71, 72, 73, 500]))
        piece = rng.choice(self.pieces)
        kind = rng.choice(KINDS) if rng.random() < 0.9 else rng.randint(0, 255)
        payload = self.payload(kind, piece)
        frame = ServerFrame(
            kind,
            rng.choice([self.table.number] * 8 + [0, self.table.number - 1, self.table.number + 1, (1 << 32) - 1]),
            piece.index,
            self.view,
            STRANGER,
            rng.randint(0, 4),
            rng.choice([0, 0, 0, protocol.WHOLE, protocol.EMPTY, protocol.NORMS | protocol.COUNTED, protocol.SHARED]),
            len(payload),
            rng.randint(0, 3),
        )
        if rng.random() < 0.5:
            frame = self.with_another_field(frame)
        header = bytearray(frame.pack())
        if rng.random() < 0.1:
            header[rng.randrange(len(header))] ^= 1 << rng.randint(0, 7)
        return bytes(header) + payload

    def with_another_field(self, frame):
        name = self.rng.choice(ServerFrame._fields)
        if name in ("scale", "divisor", "coefficient"):
            return frame._replace(**{name: self.rng.choice(FLOATS)})
        most = {"kind": 255, "flags": 255, "step": (1 << 64) - 1, "size": (1 << 64) - 1, "number": (1 << 64) - 1}
        return frame._replace(**{name: min(self.rng.choice(NUMBERS), most.get(name, (1 << 32) - 1))})

    def payload(self, kind, piece):
        rng = self.rng
        if rng.random() < 0.1:
            return rng.choice([*BOMBS, rng.randbytes(rng.randint(0, 300))])
        if kind == protocol.ENTER:
            return self.foe.spoil(self.enter) if rng.random() < 0.7 else json.dumps(self.enter).encode()
        if kind == protocol.JOIN:
            join = {"model": self.model}
            return self.foe.spoil(join) if rng.random() < 0.5 else json.dumps(join).encode()
        if kind == protocol.HYPER:
            hyper = {"groups": self.model["hyper"], "clip_value": None}
            return self.foe.spoil(hyper) if rng.random() < 0.7 else json.dumps(hyper).encode()
        if kind == protocol.APPLY:
            return self.foe.spoil({"count": 1.0, "coefficient": 0.5})
        if kind in (protocol.PUSH, protocol.RECORD):
            return bytes((piece.stop - piece.start) * rng.randint(0, 2))
        if kind == protocol.SET:
            state = bytearray(self.states(piece))
            for _ in range(rng.randint(0, 3)):
                state[rng.randrange(len(state))] ^= 1 << rng.randint(0, 7)
            return bytes(state)
        if kind in (protocol.LOOKUP_ROWS, protocol.STAMPS):
            return struct.pack("<4q", *(rng.choice([0, 1, -1, 1 << 40, piece.first_chunk << 32]) for _ in range(4)))
        return b""
