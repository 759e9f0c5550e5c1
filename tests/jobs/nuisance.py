"""Everything that a network may throw at a run's ports."""

import contextlib
import json
import os
import random
import socket
import threading

import psutil

from shoal.fleet.contact import read_contact
from shoal.parallel.links import frames
from shoal.parallel.links.frames import Frame
from shoal.wire import handshake
from shoal.wire.handshake import LinkError

HELLOS = (b"{}", b"", b'{"role":"worker","seat":0,"local":true}', b'{"purpose":"mesh","seat":0,"view":2}')
NOISE = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"SSH-2.0-scan\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"",
    b"\x00" * 4096,
    handshake.MAGIC,
    handshake.MAGIC + b"n" * 16 + b"\xff\xff",
    Frame(frames.PARTIAL, 2, 5, 0).pack() * 3,
    Frame(frames.GATHER, 2, 5, 1, size=1 << 40).pack(),
)


class Nuisance:
    """From the first step on, in a thread of its own, until it is stopped: calls every port of the run."""

    def __init__(self):
        self.done = 0
        self.ports = 0
        self.let_in = []
        self._over = threading.Event()
        self._thread = None

    def look(self, paths, event, picture):
        if event.kind == "step" and self._thread is None:
            token = read_contact(paths.control).token
            self._thread = threading.Thread(target=self._annoy, args=(token, picture.training), daemon=True)
            self._thread.start()

    def stop(self):
        self._over.set()
        if self._thread:
            self._thread.join()

    def _annoy(self, token, workers):
        rng = random.Random(0)
        targets = listening(os.getpid()) + [port for worker in workers for port in listening(worker.pid)]
        self.ports = len(targets)
        while not self._over.is_set():
            for port in targets:
                with contextlib.suppress(OSError, LinkError):
                    self._call(port, rng, token)
                self.done += 1

    def _call(self, port, rng, token):
        with socket.create_connection(("127.0.0.1", port), timeout=0.5) as sock:
            if rng.random() < 0.4:  # a stranger
                handshake.greet(sock, handshake.new_token(), rng.choice(HELLOS))
                self.let_in.append(port)
            elif rng.random() < 0.3:  # one who knows the token, and then talks nonsense
                handshake.greet(sock, token, json.dumps({"purpose": "mesh", "seat": 1, "view": 1}).encode())
                sock.sendall(rng.choice(NOISE))
            else:
                sock.sendall(rng.choice(NOISE)[: rng.randint(0, 64)])


def listening(pid):
    with contextlib.suppress(psutil.Error):
        return [c.laddr.port for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return []
