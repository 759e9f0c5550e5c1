"""Somebody on the way between two who talk over TCP: passes everything on, and keeps it."""

import contextlib
import socket
import threading


class RecordingProxy:
    def __init__(self, address, *, listen=("127.0.0.1", 0)):
        self._target = address
        self._listener = socket.create_server(listen)
        self.address = self._listener.getsockname()
        self.recorded = bytearray()
        self._pairs = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.close()
                    continue
                self._pairs.append((near, far))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.recorded += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
            return
        self._shut(source, sink)

    def _shut(self, *socks):
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def break_connections(self):
        """Both ends of all connections, without a goodbye."""
        for pair in self._pairs:
            self._shut(*pair)

    def close(self):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.break_connections()
        for pair in self._pairs:
            for sock in pair:
                sock.close()
