"""Somebody on the way between two who talk over TCP: passes everything on, and keeps it."""

import contextlib
import socket
import threading


class Relay:
    def __init__(self, address):
        self._there = address
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self.tape = bytearray()
        self._pairs = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._there)
                except OSError:
                    near.close()
                    continue
                self._pairs.append((near, far))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.tape += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
            return
        self._shut(source, sink)

    def _shut(self, *socks):
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def cut(self):
        """Both ends of all connections, without a goodbye."""
        for pair in self._pairs:
            self._shut(*pair)

    def close(self):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for pair in self._pairs:
            for sock in pair:
                sock.close()
