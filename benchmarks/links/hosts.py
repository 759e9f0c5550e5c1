"""Two hosts on this machine: unnamed network namespaces, joined by a virtual wire with an adjustable speed.

A namespace exists while a process is in it or holds its descriptor. So nothing is left when the benchmark ends, even
after a crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

INTERFACE = "wire"
ADDRESSES = ("10.213.9.1", "10.213.9.2")
BURST_S = 0.001
MIN_BURST_BYTES = 16 * 1024  # a few packets, whatever the rate
QUEUE_S = 0.05
BUNDLE = 0.9  # share of a burst; the rest is for headers
MAX_BUNDLE_BYTES = 65_536
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Hosts:
    """The thread that created them is on the near host; `far` is a descriptor of the far host's namespace."""

    near: int
    far: int

    @contextlib.contextmanager
    def on_remote(self) -> Iterator[None]:
        """Processes started inside the block run on the far host."""
        _enter(self.far)
        try:
            yield
        finally:
            _enter(self.near)

    def shape(self, mbit: float) -> None:
        """Limit the speed in both directions."""
        self._both(lambda: _shape(INTERFACE, mbit))

    def unshape(self) -> None:
        self._both(lambda: _run("tc", "qdisc", "replace", "dev", INTERFACE, "root", "pfifo_fast"))

    def _both(self, act: Callable[[], None]) -> None:
        act()
        with self.on_remote():
            act()

    @staticmethod
    def moved_bytes() -> tuple[int, int]:
        """Bytes that the near host has received and sent over the wire."""
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        counts = next(line for line in lines if line.strip().startswith(f"{INTERFACE}:")).partition(":")[2].split()
        return int(counts[0]), int(counts[8])


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Needs root. Inside the block, the calling thread and threads that it starts are on the near host."""
    home = _here()
    try:
        _leave()
        far = _here()
        _leave()
        hosts = Hosts(_here(), far)
        try:
            _ip(f"link add {INTERFACE} type veth peer name {INTERFACE} netns /proc/{os.getpid()}/fd/{far}")
            _bring_up(ADDRESSES[0])
            with hosts.on_remote():
                _bring_up(ADDRESSES[1])
            yield hosts
        finally:
            _enter(home)
            os.close(hosts.near)
            os.close(far)
    finally:
        os.close(home)


@contextlib.contextmanager
def switched(count: int, mbit: float) -> Iterator[list[Callable[[], str]]]:
    """`count` hosts at one switch, each with a full-duplex wire of `mbit`.

    Each yielded function moves the calling process to a host and returns its address; call it in a child. Needs root.
    """
    home = _here()
    kept = [home]
    try:
        _leave()
        switch = _here()
        kept.append(switch)
        _ip("link add switch type bridge")
        _ip("link set switch up")
        hosts = [_plug_in(i, switch, mbit) for i in range(count)]
        kept += [host for host, _ in hosts]
        _enter(home)
        yield [partial(_configure_in, *host) for host in hosts]
    finally:
        _enter(home)
        for namespace in kept:
            os.close(namespace)


def _plug_in(number: int, switch: int, mbit: float) -> tuple[int, str]:
    """Add a host to the switch. The calling thread returns to the switch's namespace."""
    port, address = f"port{number}", f"10.213.8.{number + 1}"
    _leave()
    host = _here()
    _enter(switch)
    _ip(f"link add {port} type veth peer name {INTERFACE} netns /proc/{os.getpid()}/fd/{host}")
    _ip(f"link set {port} master switch up")
    _shape(port, mbit)
    _enter(host)
    _bring_up(address)
    _shape(INTERFACE, mbit)
    _enter(switch)
    return host, address


def _configure_in(host: int, address: str) -> str:
    _enter(host)
    return address


def _shape(device: str, mbit: float) -> None:
    """Packets above the rate wait in a queue of 50 ms and are dropped when it is full, as in a switch.

    Packets pass in bundles of about a burst, as with a network card that segments them itself. Otherwise the kernel
    segments them and wakes up for each one, which at 100 Mbit/s takes a third of the cores that also train.
    """
    burst = max(MIN_BURST_BYTES, round(mbit * 1e6 / 8 * BURST_S))
    _ip(f"link set {device} gso_max_size {min(round(BUNDLE * burst), MAX_BUNDLE_BYTES)}")
    words = f"rate {mbit}mbit burst {burst} latency {QUEUE_S * 1000:g}ms"
    _run(*f"tc qdisc replace dev {device} root tbf {words}".split())


def _bring_up(address: str) -> None:
    _ip(f"addr add {address}/24 dev {INTERFACE}")
    _ip(f"link set {INTERFACE} up")
    _ip("link set lo up")


def _ip(words: str) -> None:
    _run("ip", *words.split())


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def _here() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _leave() -> None:
    """Move the calling thread to a new namespace."""
    _checked(_libc.unshare(_CLONE_NEWNET))


def _enter(namespace: int) -> None:
    _checked(_libc.setns(namespace, _CLONE_NEWNET))


def _checked(failed: int) -> None:
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, f"network namespaces: {os.strerror(number)}")
