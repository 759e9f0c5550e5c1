"""Returns freed memory to the system, and reports how much memory is available."""

from __future__ import annotations

import contextlib
import ctypes
import resource
from collections.abc import Mapping
from pathlib import Path

import psutil

from shoal.fleet.usage import memory_of, own_cgroups

MMAP_THRESHOLD_BYTES = 1 << 20
TRIM_THRESHOLD_BYTES = 1 << 25
OWN_LIMIT = "own"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # as in malloc.h


def release_freed_memory() -> None:
    """Make malloc return the memory of large tensors to the system when they are freed, and keep little of small ones.
    This undoes `keep_freed_memory`, which a worker calls before it knows that its model is sharded.

    By default glibc adapts and keeps such memory in fragmented heaps: with a model whose blocks are gathered and freed,
    a process keeps three times what it needs. Without glibc nothing changes.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)


def memory_headroom() -> dict[str, int]:
    """How many more bytes this process may allocate, by source of the limit: its own limits (OWN_LIMIT), its control
    groups, and the machine."""
    used = _proc_bytes("/proc/self/status")
    headroom = {name: limit - taken for name, (limit, taken) in _cgroup_limits().items()}
    headroom["machine"] = _proc_bytes("/proc/meminfo").get("MemAvailable", 0)
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        limit_bytes, _ = resource.getrlimit(limit)
        if limit_bytes != resource.RLIM_INFINITY:
            headroom[OWN_LIMIT] = min(limit_bytes - used.get(name, 0), headroom.get(OWN_LIMIT, limit_bytes))
    return headroom


def memory_limit_bytes() -> int:
    """Bytes that all processes of this machine, or of this control group, may use together."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _cgroup_limits().values())])


def fits_in_memory(
    needs: Mapping[int, int], headroom: Mapping[int, Mapping[str, int]], hosts: Mapping[int, str]
) -> bool:
    """Whether every seat may allocate the bytes it needs. A seat has its own limits for itself; the seats of a host
    share all others. Pure."""
    wanted: dict[tuple[str, str], int] = {}
    available: dict[tuple[str, str], int] = {}
    for seat, need in needs.items():
        for name, free in headroom[seat].items():
            key = (f"{seat}", name) if name == OWN_LIMIT else (hosts[seat], name)
            wanted[key] = wanted.get(key, 0) + need
            available[key] = min(free, available.get(key, free))
    return all(wanted[key] <= available[key] for key in wanted)


def _proc_bytes(path: str) -> dict[str, int]:
    """The values of lines like `VmSize: 123 kB`, in bytes."""
    values = {}
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            name, _, rest = line.partition(":")
            if rest.endswith(" kB"):
                values[name] = int(rest.split()[0]) << 10
    return values


def _cgroup_limits() -> dict[str, tuple[int, int]]:
    """Limit and current use of this process's control groups, if they have a limit."""
    return {str(group): found for group in own_cgroups() if (found := memory_of(group)) is not None}
