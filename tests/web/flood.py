"""More requests and connections than a server wants, until they are told to end."""

import contextlib
import itertools
import socket
import threading
from collections import Counter

from shoal.web.serve import MAX_CONNECTIONS

RUN = "/api/v1/runs/digits-1"
QUESTIONS = (
    "/", "/api/v1/runs", "/api/v1/storage", "/metrics", f"{RUN}/series?points=2000", f"{RUN}/timeline",
    f"{RUN}/events?limit=1000", f"{RUN}/search?find=a", "/api/v1/compare?runs=digits-1,digits-1",
)  # fmt: skip
SENDERS = 8
SILENT = (MAX_CONNECTIONS // 2, 2 * MAX_CONNECTIONS)
"""By turns: beside the others, and so many that nobody else is served."""


def request(method, path, *, host, token, body=b""):
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class Flood:
    """Questions, operations, wrong tokens, streams that nobody reads, cut requests, noise, and silent connections.
    `counted`: answers by status."""

    def __init__(self, url, tokens):
        self._host = url.removeprefix("http://")
        self._tokens = tokens
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self.counted = Counter()

    def __enter__(self):
        self._threads = [threading.Thread(target=self._send) for _ in range(SENDERS)]
        self._threads.append(threading.Thread(target=self._hold_silent))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *failure):
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _messages(self):
        def made(method, path, token, body=b""):
            return request(method, path, host=self._host, token=token, body=body)

        for token in self._tokens:
            yield from (made("GET", path, token) for path in QUESTIONS)
            yield made("POST", f"{RUN}/stacks", token, b"{}")
            yield made("POST", f"{RUN}/scale", token, b'{"workers": 2}')
            yield made("POST", f"{RUN}/tags", token, b'{"add": ["%s"]}' % (b"x" * 100_000))
        yield made("GET", "/api/v1/runs", "wrong")
        yield made("GET", "/api/v1/runs", self._tokens[0])[:-2]  # its head has no end
        yield bytes(range(256)) * 64

    def _send(self):
        for message in itertools.cycle(self._messages()):
            if self._ended.is_set():
                return
            with contextlib.suppress(OSError), self._connect() as connection:
                connection.sendall(message)
                status = connection.recv(12)[9:]
                with self._lock:
                    self.counted[status] += 1

    def _hold_silent(self):
        """Streams that nobody reads, then connections that say nothing, all of them anew again and again."""
        stream = "/api/v1/stream?runs=digits-1&after=0"
        for count in itertools.cycle(SILENT):
            if self._ended.is_set():
                return
            with contextlib.ExitStack() as opened:
                for n in range(count):
                    with contextlib.suppress(OSError):
                        connection = opened.enter_context(self._connect())
                        if n < SENDERS:
                            connection.sendall(request("GET", stream, host=self._host, token=self._tokens[0]))
                self._ended.wait(1)

    def _connect(self):
        host, port = self._host.split(":")
        return socket.create_connection((host, int(port)), timeout=1)
