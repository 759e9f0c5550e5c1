"""`shoal web`: binds the address, prints a link, and serves until it is interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from shoal.errors import error
from shoal.jobs.queue.access_tokens import Identity, TokenFile
from shoal.net.address import format_address, parse_address
from shoal.web.access import OWNER, AccessControl
from shoal.web.app import make_app
from shoal.web.gate import AllowedHosts
from shoal.web.site import Site

DEFAULT_PORT = 8470
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
MAX_HEADER_BYTES = 16 * 1024
MAX_CONNECTIONS = 256
"""More than these are told to come again (503)."""
MOST_CONNECTIONS = 3 * MAX_CONNECTIONS
"""More than these are cut at once: a process may often open no more than 1024 files."""
SHUTDOWN_S = 1
TICK_S = 1.0
REQUEST_TIMEOUT_S = 30.0
TLS_TIMEOUT_S = 5.0
"""A connection whose TLS does not begin, or does not end, within this is closed."""


@dataclass(frozen=True)
class WebAddress:
    """Where to listen. `port` 0 takes a free one."""

    host: str
    port: int
    is_loopback: bool


def parse_listen(text: str, *, tls: Path | None) -> WebAddress:
    """SH675 if the address may not be served: off this machine only with TLS, and never on all addresses."""
    try:
        host, port = parse_address(text) if ":" in text else (text, DEFAULT_PORT)
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        fix = "Write an IP address of this machine, such as 127.0.0.1:8470."
        raise error("SH675", f"'{text}' is not ADDRESS:PORT", where="--listen", fix=fix) from None
    if address.is_unspecified:
        fix = "Name the address that browsers use; --name adds names."
        raise error("SH675", f"{host} is every address of this machine", where="--listen", fix=fix)
    if not address.is_loopback and tls is None:
        fix = f"Give --tls DIR with cert.pem and key.pem; or stay here and use: ssh -L {port}:127.0.0.1:{port} {host}"
        raise error("SH675", f"{host} can be reached from other machines, without TLS", where="--listen", fix=fix)
    if port > 65535:
        raise error("SH675", f"there is no port {port}", where="--listen")
    return WebAddress(str(address), port, address.is_loopback)


class _Listener(socket.socket):
    """Cuts connections that are too many where they are accepted: with TLS, uvicorn knows of one only when its
    handshake is done."""

    def __init__(self, family: socket.AddressFamily) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self._accepted: set[socket.socket] = set()

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        if len(self._accepted) >= MOST_CONNECTIONS:
            self._accepted = {one for one in self._accepted if one.fileno() >= 0}
        if len(self._accepted) >= MOST_CONNECTIONS:
            connection.close()
            raise ConnectionAbortedError("there are too many connections")
        self._accepted.add(connection)
        return connection, address


def bind(address: WebAddress, *, is_default: bool) -> socket.socket:
    """Bind the address. If the default port is taken, a free one is used."""
    listener = _Listener(socket.AF_INET6 if ":" in address.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            listener.bind((address.host, address.port))
        except OSError:
            if not is_default:
                raise
            listener.bind((address.host, 0))
        listener.listen(128)
    except OSError as failure:
        listener.close()
        where = format_address(address.host, address.port)
        raise error("SH611", f"{failure.strerror}", where=where, fix="Choose another address or port.") from failure
    return listener


def tls_context(directory: Path) -> ssl.SSLContext:
    """TLS 1.2 or newer for browsers: the server shows its certificate, clients show their token."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(directory / "cert.pem", directory / "key.pem", password="")
    except (OSError, ValueError) as failure:
        message = f"{directory}/cert.pem and key.pem cannot be used: {getattr(failure, 'reason', '') or failure}"
        fix = "Give a directory with cert.pem and key.pem: a certificate and its key, which needs no password."
        raise error("SH619", message, where="--tls", fix=fix) from failure
    return context


class _Connection(H11Protocol):
    """Is closed if its request does not come: `MAX_CONNECTIONS` silent ones would keep everybody else out. (uvicorn
    bounds only the time from an answer to the first byte of the next request.)"""

    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._patience is not None:
            self._patience.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_request()

    def _wait_for_request(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._patience = self.loop.call_later(REQUEST_TIMEOUT_S, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class _Server(uvicorn.Server):
    """Tells the open streams to end: uvicorn waits for them. Where nobody asks it wakes once a second, not ten times:
    the cores are for the training."""

    _loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, config: uvicorn.Config, site: Site) -> None:
        super().__init__(config)
        self._site = site
        self._ending = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, which waits a minute for TLS."""

        def connect() -> _Connection:
            return _Connection(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

        loop, tls = asyncio.get_running_loop(), self.config.ssl
        patience_s = None if tls is None else TLS_TIMEOUT_S
        self.servers = [
            await loop.create_server(
                connect, sock=one, ssl=tls, ssl_handshake_timeout=patience_s, ssl_shutdown_timeout=patience_s
            )
            for one in sockets or []
        ]
        self.started = True

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), TICK_S)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self.end()

    def end(self) -> None:
        """Also from a signal handler or another thread."""
        self._site.stopping.set()
        self.should_exit = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._ending.set)


class WebServer:
    """Serves one directory of runs."""

    def __init__(
        self, runs: Path, *, listen: str = "", tls: Path | None = None, names: tuple[str, ...] = (),
        say: Callable[[str], None] = print,
    ) -> None:  # fmt: skip
        if not runs.is_dir():
            raise error("SH605", f"there is no directory {runs}", where="--runs", fix="Give the directory of the runs.")
        address = parse_listen(listen or f"127.0.0.1:{DEFAULT_PORT}", tls=tls)
        self._context = None if tls is None else tls_context(tls)
        self._listener = bind(address, is_default=not listen)
        host, port = self._listener.getsockname()[:2]
        scheme = "http" if tls is None else "https"
        served = {host, *names, *(LOOPBACK_NAMES if address.is_loopback else ())}
        self.allowed = AllowedHosts.of(served, port=port, scheme=scheme)
        self.url = f"{scheme}://{format_address(names[0] if names else host, port)}"
        self.access = AccessControl(TokenFile(runs))
        self.site = Site(runs, say=say)
        cookie = f"{'__Host-' if tls else ''}shoal-{port}"
        self.app = make_app(self.site, self.access, self.allowed, cookie=cookie)
        self._server = _Server(self._config(), self.site)

    def _config(self) -> uvicorn.Config:
        config = uvicorn.Config(
            self.app,
            loop="asyncio",  # uvloop does not ask the listener
            log_config=None,
            log_level="error",  # a line for each refused connection would let anybody fill a log
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=15,
            timeout_graceful_shutdown=SHUTDOWN_S,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
        if self._context is not None:
            config.load()
            config.ssl = self._context
        return config

    def link(self, who: str = OWNER) -> str:
        """A link with a one-time code. The code stands after `#`: browsers do not send that part."""
        return f"{self.url}/#code={self.access.make_code(Identity(who, 'submit'))}"

    def run(self) -> None:
        """Serve until SIGINT or SIGTERM."""
        try:
            self._server.run(sockets=[self._listener])
        except KeyboardInterrupt:
            pass
        finally:
            self.site.close()
            self._listener.close()

    def run_in_thread(self) -> None:
        """Serve until `stop` is called, without taking signals: for a thread that is not the main one."""
        try:
            self._server.run(sockets=[self._listener])
        finally:
            self.site.close()
            self._listener.close()

    def stop(self) -> None:
        """From another thread."""
        self._server.end()
