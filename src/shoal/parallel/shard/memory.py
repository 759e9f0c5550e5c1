"""Memory that is freed goes back to the system; and how much there is."""

from __future__ import annotations

import contextlib
import ctypes
import resource
from pathlib import Path

import psutil

LARGE_BYTES = 1 << 20
_M_MMAP_THRESHOLD = -3
_GROUPS = Path("/sys/fs/cgroup")


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
    return max(min([*found, *(limit - used for limit, used in _group_limits())]), 0)


def limit_bytes() -> int:
    """How much all processes here may take together: what the machine has, or what their group may have of it."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _group_limits())])


def _kilobytes(path: str) -> dict[str, int]:
    """Of lines like `VmSize: 123 kB`, in bytes."""
    found = {}
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            name, _, rest = line.partition(":")
            if rest.endswith(" kB"):
                found[name] = int(rest.split()[0]) << 10
    return found


def _group_limits(groups: Path = _GROUPS, own: Path = Path("/proc/self/cgroup")) -> list[tuple[int, int]]:
    """The limits of this process's control group and of those around it, where they have one, and what is taken."""
    found = []
    with contextlib.suppress(OSError):
        group = groups / own.read_text().strip().rpartition(":")[2].lstrip("/")
        for one in (group, *group.parents[: len(group.parts) - len(groups.parts)]):
            with contextlib.suppress(OSError, ValueError):  # "max"
                found.append((int((one / "memory.max").read_text()), int((one / "memory.current").read_text())))
    return found
