"""A process that knows the token and does not keep to the protocol."""

import contextlib
import json

from shoal.net.listener import connect_host
from tests.jobs.test_worker_group import ADDRESS

JOINED = {"managed": False, "can_save": False, "needs_job": True}
STARTED = {"managed": True, "can_save": True, "needs_job": False}
HELLO = {"role": "worker", "seat": None, "attachment": JOINED, "pid": 1, "host": "foe", "address": ADDRESS,
         "view": 0, "training": False}  # fmt: skip
TIMEOUT_S = 30


class Foe:
    """A connection with the token, and a hello of its own making."""

    def __init__(self, address, hello):
        self.sock = connect_host(address.host, address.port, address.token, json.dumps(hello).encode())
        self.sock.settimeout(TIMEOUT_S)
        self.lines = self.sock.makefile("rb")

    def say(self, kind, **fields):
        self.send(json.dumps({"kind": kind} | fields).encode() + b"\n")

    def send(self, data):
        with contextlib.suppress(OSError):  # the driver may hang up first
            self.sock.sendall(data)

    def rows(self):
        """What the driver says, until it hangs up."""
        with contextlib.suppress(OSError):
            for line in self.lines:
                if (row := json.loads(line))["kind"] != "ping":
                    yield row

    def close(self):
        self.lines.close()
        self.sock.close()
