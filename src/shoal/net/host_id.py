"""Which processes share a machine."""

from __future__ import annotations

import os

MACHINE_VARIABLE = "SHOAL_MACHINE"
"""Processes with another value pretend to be on another machine; see `engine: {kind: local, apart: true}`."""


def host_id() -> str:
    """Equal for processes that can share memory and see each other in /proc: the same boot, and the same network and
    process namespaces."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    machine = os.environ.get(MACHINE_VARIABLE, "")
    namespaces = f"{os.stat('/proc/self/ns/net').st_ino}:{os.stat('/proc/self/ns/pid').st_ino}"
    return f"{boot}:{namespaces}:{machine}" if machine else f"{boot}:{namespaces}"
