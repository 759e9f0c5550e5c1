"""What a worker uses of its machine, read from files of the kernel: some tens of microseconds every two seconds."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

INTERVAL_S = 2.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
CGROUP_ROOT = Path("/sys/fs/cgroup")
RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")


class UsageSampler:
    """Belongs to one thread. `moved_bytes`: all bytes that the worker has exchanged so far. `device_memory`: used and
    total bytes of its GPU, None without one."""

    def __init__(
        self,
        moved_bytes: Callable[[], int],
        device_memory: Callable[[], tuple[int, int] | None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._moved_bytes, self._device_memory, self._clock = moved_bytes, device_memory, clock
        self._last = (clock(), time.process_time(), 0)

    def sample(self) -> dict[str, Any] | None:
        """The fields of a heartbeat's `usage`; None if the last sample is not two seconds old."""
        now, (then, cpu_before_s, moved_before) = self._clock(), self._last
        if now - then < INTERVAL_S:
            return None
        cpu_s, moved = time.process_time(), self._moved_bytes()
        self._last = now, cpu_s, moved
        rss_bytes = _resident_bytes()
        found = {
            "cpu": round((cpu_s - cpu_before_s) / (now - then), 3),
            "rss_bytes": rss_bytes,
            "room_bytes": room_bytes(own_cgroups()),  # it enters another group when its limits are set
            "net_bytes_s": max(round((moved - moved_before) / (now - then)), 0),
        }
        device = self._device_memory()
        return found if device is None else found | {"device_bytes": device[0], "device_total_bytes": device[1]}


def room_bytes(groups: Iterable[Path]) -> int:
    """How many more bytes this process may take: by the machine, its cgroups and its own limit, whichever is least."""
    rooms = [_available_bytes(), *(_room_in(group) for group in groups), _room_by_limit()]
    return max(min(room for room in rooms if room is not None), 0)


def own_cgroups(root: Path = CGROUP_ROOT, text: str | None = None) -> Iterator[Path]:
    """The groups of cgroup v2 that this process is in and that bound memory, the innermost first. In a container `root`
    is one of them."""
    try:
        told = Path("/proc/self/cgroup").read_text(encoding="utf-8") if text is None else text
    except OSError:
        return
    own = next((line[3:] for line in told.splitlines() if line.startswith("0::")), None)
    if own is not None:
        inner = root / own.lstrip("/")
        for directory in (inner, *inner.parents):
            if (directory / "memory.max").is_file():
                yield directory
            if directory == root:
                return


def memory_of(group: Path) -> tuple[int, int] | None:
    """Limit and use of a group; None without a limit. What the kernel would take back (cached files) is not in use."""
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        if limit == "max":
            return None
        used = int((group / "memory.current").read_text(encoding="ascii"))
        counts = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        return int(limit), max(used - sum(int(counts.get(name, 0)) for name in RECLAIMABLE), 0)
    except (OSError, ValueError):
        return None


def _room_in(group: Path) -> int | None:
    found = memory_of(group)
    return None if found is None else found[0] - found[1]


def _room_by_limit() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return limit - _field_bytes("/proc/self/status", "VmData:")


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0


def _available_bytes() -> int:
    return _field_bytes("/proc/meminfo", "MemAvailable:")


def _field_bytes(path: str, name: str) -> int:
    """A field in kB of a file of the kernel; 0 if it is not there."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith(name)), 0)
    except (OSError, ValueError):
        return 0


def oom_kills() -> int:
    """How many processes the kernel has ended on this machine because memory ran out; 0 if it does not say."""
    try:
        with open("/proc/vmstat", encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except (OSError, ValueError):
        return 0
