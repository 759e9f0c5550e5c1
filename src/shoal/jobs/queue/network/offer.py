"""`shoal offer`: this machine's cores for the queue of another machine, for as long as this process lives.

The daemon of the queue asks for an agent for each worker. Agents end with their connection, and so do their workers.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from shoal.errors import EXIT_OK, ShoalError, error
from shoal.fleet.agents.host_agent import CERTIFICATES_VARIABLE
from shoal.fleet.engines.make import capacity_of
from shoal.fleet.engines.ssh import AGENT_MODULE
from shoal.jobs.queue.access_tokens import name_of_key
from shoal.jobs.queue.network import frames
from shoal.jobs.queue.network.messages import (
    MAX_CORES,
    NAME_PATTERN,
    TO_MACHINE,
    ChannelHello,
    LeavingMessage,
    OfferHello,
    OpenMessage,
    PingMessage,
    RefusedMessage,
    encode,
    parse,
)
from shoal.jobs.queue.network.remote_queue import QueueAddress
from shoal.jobs.run_executor import catch_stop_signals
from shoal.net.errors import ProtocolError
from shoal.net.relay import break_off, relay_pipes
from shoal.spec.engine import LocalEngineConfig

RETRY_S, MAX_RETRY_S = 1.0, 30.0
WAIT_S = 0.2
SILENCE_S = 10.0
GIVE_UP_S = 15.0
"""A machine of the same name may be this one before it died: the queue notices that only after a silence."""
PASSING = ("SH610",)
"""Failures that may pass: the daemon is started again, or the network comes back."""


def offer(
    address: QueueAddress, *, cores: int, machine: str = "", tls: Path | None = None, show: Callable[[str], None]
) -> int:
    """Offer cores until SIGINT or SIGTERM; then the workers leave first. Returns the exit code. SH615 if the token is
    not that of a machine, SH659 if another machine has the name."""
    (node,) = capacity_of(LocalEngineConfig())
    cores = cores or node.cores
    if not 1 <= cores <= MAX_CORES:
        raise error("SH609", f"{cores} cores", where="--cores", fix=f"Offer 1 to {MAX_CORES}.")
    name = machine or socket.gethostname()
    if not re.fullmatch(NAME_PATTERN, name):
        fix = "Write at most 63 letters, digits, dots, hyphens and underscores: --name box-2"
        raise error("SH609", f"'{name}' is no name of a machine", where="--name", fix=fix)
    hello = OfferHello(
        key=name_of_key(address.key),
        instance=secrets.token_hex(16),
        machine=name,
        cores=cores,
        memory_bytes=max(node.memory_bytes, 0),
    )
    with catch_stop_signals() as asked:
        return _Offer(address, hello, tls, show).run(asked)


class _Offer:
    def __init__(self, address: QueueAddress, hello: OfferHello, tls: Path | None, show: Callable[[str], None]) -> None:
        self._address = address
        self._hello = hello
        self._tls = tls
        self._show = show
        self._refusal = ""
        self._agents: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()

    def run(self, asked: list[str]) -> int:
        pause_s, refused_at_s = RETRY_S, math.inf
        while not asked:
            try:
                sock = self._address.connect(encode(self._hello))
            except ShoalError as failure:
                if failure.code not in PASSING:
                    raise
                self._show(f"{failure.message}; tried again in {pause_s:g} s")
                _sleep(pause_s, asked)
                pause_s = min(2 * pause_s, MAX_RETRY_S)
                continue
            pause_s = RETRY_S
            self._refusal = ""
            with contextlib.closing(sock):
                self._serve(sock, asked)
            self._end_agents()
            refused_at_s = min(refused_at_s, time.monotonic()) if self._refusal else math.inf
            if time.monotonic() - refused_at_s >= GIVE_UP_S:
                raise error("SH659", self._refusal, where="--name", fix="Give this machine another name: --name NAME")
            if not asked:
                self._show(self._refusal or "the queue is gone")
                _sleep(RETRY_S, asked)
        return EXIT_OK

    def _serve(self, sock: socket.socket, asked: list[str]) -> None:
        reader = threading.Thread(target=self._read, args=(sock,), name="shoal-offer", daemon=True)
        reader.start()
        leaving = False
        while reader.is_alive():
            reader.join(WAIT_S)
            if asked and not leaving:
                leaving = True
                self._show("leaving as soon as others have what is held here")
                _tell(sock, encode(LeavingMessage()))
            if leaving:
                self._signal_agents()
                if not self._agents:
                    break_off(sock)

    def _read(self, sock: socket.socket) -> None:
        belongs = False
        with contextlib.suppress(ProtocolError):
            for line in frames.read_lines(sock, pause_s=SILENCE_S, silence_s=SILENCE_S, on_pause=lambda: None):
                message = parse(TO_MACHINE, line)
                if isinstance(message, RefusedMessage):
                    self._refusal = message.why
                    return
                if not belongs:
                    belongs = True
                    self._show(f"offers {self._hello.cores} cores as {self._hello.machine}")
                if isinstance(message, OpenMessage):
                    threading.Thread(target=self._run_agent, args=(message.channel,), daemon=True).start()
                else:
                    _tell(sock, encode(PingMessage()))

    def _run_agent(self, channel: str) -> None:
        own = {CERTIFICATES_VARIABLE: str(self._tls.resolve())} if self._tls else {}
        hello = encode(ChannelHello(key=self._hello.key, channel=channel))
        try:
            sock = self._address.connect(hello)
        except ShoalError as failure:
            self._show(str(failure))
            return
        command = [sys.executable, "-P", "-m", AGENT_MODULE]
        with contextlib.closing(sock):
            agent = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | own,
                start_new_session=True,  # Ctrl-C in the terminal reaches only this process
            )
            assert agent.stdin is not None
            assert agent.stdout is not None
            with self._lock:
                self._agents.add(agent)
            relay_pipes(sock, source=agent.stdout.fileno(), sink=agent.stdin.fileno())
            with contextlib.suppress(OSError):
                agent.stdin.close()  # it kills its processes and ends
            agent.wait()
            with self._lock:
                self._agents.discard(agent)

    def _signal_agents(self) -> None:
        """Repeatedly: an agent that has just started does not handle signals yet."""
        with self._lock:
            for agent in self._agents:
                if agent.poll() is None:
                    agent.send_signal(signal.SIGTERM)

    def _end_agents(self) -> None:
        """The daemon is gone: nobody can use them any more."""
        with self._lock:
            agents = list(self._agents)
        for agent in agents:
            if agent.stdin is not None:
                with contextlib.suppress(OSError):
                    agent.stdin.close()
            agent.wait()


def _tell(sock: socket.socket, message: bytes) -> None:
    with contextlib.suppress(OSError):
        sock.sendall(message + b"\n")


def _sleep(seconds: float, asked: list[str]) -> None:
    until_s = time.monotonic() + seconds
    while not asked and time.monotonic() < until_s:
        time.sleep(WAIT_S)
