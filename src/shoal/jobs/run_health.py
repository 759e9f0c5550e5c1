"""Whether the machine can carry a run (directory, disk, limits), and the errors for processes that it cannot carry."""

from __future__ import annotations

import os
import resource

from shoal.errors import ShoalError, error, from_os_error
from shoal.fleet.engine import Exit
from shoal.spec.receipt import Receipt
from shoal.spec.run_paths import RunPaths, write_atomically

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


def worker_death(paths: RunPaths, one: Exit, why: str) -> ShoalError:
    """The error of a worker that died and is not replaced."""
    log = paths.error_log(one.seat)
    hint = " (out of memory?)" if one.reason == "SIGKILL" else ""
    where = str(log if log.exists() else paths.root)
    return error("SH603", f"worker-{one.seat} ended by {one.reason}{hint}; {why}", where=where)


def server_loss(paths: RunPaths, one: Exit, why: str) -> ShoalError:
    """The error of servers that are lost with this one."""
    where = str(paths.error_log(one.seat, "server"))
    return one.start_error or find_damage(paths) or error("SH618", why, where=where)


def write_receipt(paths: RunPaths, receipt: Receipt) -> None:
    """SH510 if the disk is full, SH605 if the receipt cannot be written for another reason."""
    try:
        write_atomically(paths.receipt, receipt.model_dump_json(indent=2) + "\n")
    except OSError as failure:
        where = str(paths.receipt)
        raise from_os_error(failure, where=where) or error("SH605", str(failure), where=where) from failure


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
