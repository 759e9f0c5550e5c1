"""Memory that is freed goes back to the system; and how much there is."""

from __future__ import annotations

import contextlib
import ctypes
import resource
from pathlib import Path

LARGE_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3


def give_back() -> None:
    """From now on, large tensors are memory of their own that is gone when they are.

    glibc would learn from the first that are freed to keep such memory for the next, in heaps that are full of holes:
    of a model whose blocks come and go, a process then keeps three times what it needs. Elsewhere nothing changes.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def room_bytes() -> int:
    """How much more memory this process may take: by its own limits, its group's, and what the machine has."""
    used = _kilobytes("/proc/self/status")
    found = [_kilobytes("/proc/meminfo").get("MemAvailable", 0)]
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            found.append(most - used.get(name, 0))
    return max(min([*found, *_group_room()]), 0)


def _kilobytes(path: str) -> dict[str, int]:
    """Of lines like `VmSize: 123 kB`, in bytes."""
    found = {}
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            name, _, rest = line.partition(":")
            if rest.endswith(" kB"):
                found[name] = int(rest.split()[0]) << 10
    return found


def _group_room() -> list[int]:
    """What is left of the limit of this process's control group, if it has one."""
    with contextlib.suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup") / Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2].lstrip("/")
        return [int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())]
    return []
