"""Two hosts on this machine: network namespaces without names, joined by a wire whose speed can be set.

A namespace lives as long as somebody is in it or holds its descriptor. So nothing is left when the benchmark ends,
however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

WIRE = "wire"
ADDRESSES = ("10.213.9.1", "10.213.9.2")
BURST_S = 0.001
LEAST_BURST_BYTES = 16 * 1024  # a few packets, whatever the rate
QUEUE_S = 0.05
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Hosts:
    """The thread that made them is on the near one; `far` is a descriptor of the other's namespace."""

    near: int
    far: int

    @contextlib.contextmanager
    def on_the_far_one(self) -> Iterator[None]:
        """Processes that are started here are started there."""
        _enter(self.far)
        try:
            yield
        finally:
            _enter(self.near)

    def shape(self, mbit: float) -> None:
        """Both ways. What the wire cannot take waits in a queue of 50 ms, then it is dropped, as a switch does it."""
        rate = mbit * 1e6 / 8
        burst = max(LEAST_BURST_BYTES, round(rate * BURST_S))
        words = f"rate {mbit}mbit burst {burst} latency {QUEUE_S * 1000:g}ms".split()
        self._both("tc", "qdisc", "replace", "dev", WIRE, "root", "tbf", *words)

    def unshape(self) -> None:
        self._both("tc", "qdisc", "replace", "dev", WIRE, "root", "pfifo_fast")

    def _both(self, *words: str) -> None:
        _run(*words)
        with self.on_the_far_one():
            _run(*words)

    @staticmethod
    def moved_bytes() -> tuple[int, int]:
        """What has come to the near host over the wire, and what has left it."""
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        counts = next(line for line in lines if line.strip().startswith(f"{WIRE}:")).partition(":")[2].split()
        return int(counts[0]), int(counts[8])


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Needs root. The calling thread is on the near host meanwhile; others that it starts are too."""
    home = _here()
    try:
        _leave()
        far = _here()
        _leave()
        hosts = Hosts(_here(), far)
        try:
            _run(
                "ip",
                "link",
                "add",
                WIRE,
                "type",
                "veth",
                "peer",
                "name",
                WIRE,
                "netns",
                f"/proc/{os.getpid()}/fd/{far}",
            )
            _settle(ADDRESSES[0])
            with hosts.on_the_far_one():
                _settle(ADDRESSES[1])
            yield hosts
        finally:
            _enter(home)
            os.close(hosts.near)
            os.close(far)
    finally:
        os.close(home)


def _settle(address: str) -> None:
    _run("ip", "addr", "add", f"{address}/24", "dev", WIRE)
    _run("ip", "link", "set", WIRE, "up")
    _run("ip", "link", "set", "lo", "up")


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def _here() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _leave() -> None:
    """To a new namespace of one's own."""
    _checked(_libc.unshare(_CLONE_NEWNET))


def _enter(namespace: int) -> None:
    _checked(_libc.setns(namespace, _CLONE_NEWNET))


def _checked(failed: int) -> None:
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, f"network namespaces: {os.strerror(number)}")
