"""Everything that a network may throw at a run's ports."""

import contextlib
import json
import os
import random
import socket
import threading

import psutil

from shoal.collectives.transport import frames
from shoal.collectives.transport.frames import PeerFrame
from shoal.fleet.driver_address import read_driver_address
from shoal.net import handshake
from shoal.net.errors import LinkError

HELLOS = (b"{}", b"", b'{"role":"worker","seat":0,"attachment":{}}', b'{"purpose":"mesh","seat":0,"view":2}')
NOISE = (
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"SSH-2.0-scan\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"",
    b"\x00" * 4096,
    handshake.MAGIC,
    handshake.MAGIC + b"n" * 16 + b"\xff\xff",
    PeerFrame(frames.PARTIAL, 2, 5, 0).pack() * 3,
    PeerFrame(frames.GATHER, 2, 5, 1, size=1 << 40).pack(),
)


class PortScanner:
    """From the first step on, in a thread of its own, until it is stopped: calls every port of the driver, of workers
    and of servers."""

    def __init__(self):
        self.attempts = 0
        self.called_ports = set()
        self.accepted_ports = []
        self._pids = [os.getpid()]
        self._stopped = threading.Event()
        self._thread = None

    def on_event(self, paths, event, run_state):
        if event.kind != "step":
            return
        self._pids = [os.getpid(), *(one.pid for one in run_state.training_workers + run_state.serving_servers)]
        if self._thread is None:
            token = read_driver_address(paths.driver_address).token
            self._thread = threading.Thread(target=self._scan, args=(token,), daemon=True)
            self._thread.start()

    def stop(self):
        self._stopped.set()
        if self._thread:
            self._thread.join()

    def _scan(self, token):
        rng = random.Random(0)
        while not self._stopped.is_set():
            targets = [port for pid in self._pids for port in listening_ports(pid)]
            self.called_ports.update(targets)
            for port in targets:
                with contextlib.suppress(OSError, LinkError):
                    self._probe_port(port, rng, token)
                self.attempts += 1

    def _probe_port(self, port, rng, token):
        with socket.create_connection(("127.0.0.1", port), timeout=0.5) as sock:
            if rng.random() < 0.4:  # a stranger
                handshake.client_handshake(sock, handshake.new_token(), rng.choice(HELLOS))
                self.accepted_ports.append(port)
            elif rng.random() < 0.3:  # one who knows the token, and then talks nonsense
                handshake.client_handshake(sock, token, json.dumps({"purpose": "mesh", "seat": 1, "view": 1}).encode())
                sock.sendall(rng.choice(NOISE))
            else:
                sock.sendall(rng.choice(NOISE)[: rng.randint(0, 64)])


def listening_ports(pid):
    with contextlib.suppress(psutil.Error):
        return [c.laddr.port for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return []
