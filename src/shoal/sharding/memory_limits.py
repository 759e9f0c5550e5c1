"""Memory that is freed goes back to the system; and how much there is."""

from __future__ import annotations

import contextlib
import ctypes
import resource
from collections.abc import Mapping
from pathlib import Path

import psutil

MMAP_THRESHOLD_BYTES = 1 << 20
TRIM_THRESHOLD_BYTES = 1 << 25
OWN_LIMIT = "own"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # names that malloc.h has for them
_CGROUP_ROOT, _OWN_CGROUP_FILE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def release_freed_memory() -> None:
    """From now on, large tensors are memory of their own that is gone when they are, and of what small ones leave
    behind little is kept: a worker has asked for more when it did not know yet that it holds a part.

    glibc would learn from the first that are freed to keep such memory for the next, in heaps that are full of holes:
    of a model whose blocks come and go, a process then keeps three times what it needs. Elsewhere nothing changes.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)


def memory_headroom() -> dict[str, int]:
    """How many bytes more this process may take, by what says so: its own limits (OWN), those of its control group, and
    what the machine has."""
    used = _proc_bytes("/proc/self/status")
    found = {name: limit - taken for name, (limit, taken) in _cgroup_limits().items()}
    found["machine"] = _proc_bytes("/proc/meminfo").get("MemAvailable", 0)
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            found[OWN_LIMIT] = min(most - used.get(name, 0), found.get(OWN_LIMIT, most))
    return found


def memory_limit_bytes() -> int:
    """How much all processes here may take together: what the machine has, or what their group may have of it."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _cgroup_limits().values())])


def fits_in_memory(
    needs: Mapping[int, int], headroom: Mapping[int, Mapping[str, int]], hosts: Mapping[int, str]
) -> bool:
    """May every seat take as many bytes as it needs? What is there by its own limits is there for each, all else for
    those on the same host together. Pure."""
    wanted: dict[tuple[str, str], int] = {}
    there: dict[tuple[str, str], int] = {}
    for seat, need in needs.items():
        for name, room in headroom[seat].items():
            key = (f"{seat}", name) if name == OWN_LIMIT else (hosts[seat], name)
            wanted[key] = wanted.get(key, 0) + need
            there[key] = min(room, there.get(key, room))
    return all(wanted[key] <= there[key] for key in wanted)


def _proc_bytes(path: str) -> dict[str, int]:
    """Of lines like `VmSize: 123 kB`, in bytes."""
    found = {}
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            name, _, rest = line.partition(":")
            if rest.endswith(" kB"):
                found[name] = int(rest.split()[0]) << 10
    return found


def _cgroup_limits(root: Path = _CGROUP_ROOT, own_file: Path = _OWN_CGROUP_FILE) -> dict[str, tuple[int, int]]:
    """Of this process's control group and of those around it, where they have one: the limit, and what is taken."""
    found = {}
    with contextlib.suppress(OSError):
        group = root / own_file.read_text().strip().rpartition(":")[2].lstrip("/")
        for one in (group, *group.parents[: len(group.parts) - len(root.parts)]):
            with contextlib.suppress(OSError, ValueError):  # "max"
                found[str(one)] = int((one / "memory.max").read_text()), int((one / "memory.current").read_text())
    return found
