"""Whether the machine can carry a run: its directory, its disk, and the limits of the operating system."""

from __future__ import annotations

import os
import resource

from shoal.errors import ShoalError, error
from shoal.spec.run_paths import RunPaths

MIN_FREE_BYTES = 64 << 10
"""With less free space no process of the run can report what it does."""
_BASE_DESCRIPTORS = 64
_DESCRIPTORS_PER_PROCESS = 6


def find_damage(paths: RunPaths) -> ShoalError | None:
    """Why no process of the run can go on: its directory is gone, or its disk is full. None if neither is so."""
    if not paths.events.exists():
        return error("SH627", "somebody deleted or moved it while the run was going on", where=str(paths.root))
    try:
        free = os.statvfs(paths.root)
    except OSError:
        return None
    free_bytes = free.f_bavail * free.f_frsize
    if free_bytes < MIN_FREE_BYTES:
        message = f"{free_bytes:,} bytes are free, too few for the processes of the run to go on"
        return error("SH510", message, where=str(paths.root))
    return None


def ensure_descriptors(processes: int) -> None:
    """Raise this process's limit of open files to what a run with so many workers and servers needs. Every process that
    it starts inherits the limit. SH628 if the system forbids it."""
    needed = _BASE_DESCRIPTORS + _DESCRIPTORS_PER_PROCESS * processes
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        message = f"{processes} workers and servers need {needed:,} open files, and {hard:,} are allowed"
        raise error("SH628", message, fix=f"Raise the limit: ulimit -n {needed}. Or use fewer workers.")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
