"""One daemon per queue: a lock of the operating system, and a lease with an epoch in the queue file.

The lock is free as soon as its process is dead. The lease protects where the lock does not reach: a process of another
kernel, or one that was stopped for long and wakes up.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from shoal.errors import ShoalError, error
from shoal.jobs.queue.queue_file import QueuePaths, refuse_network_file_system
from shoal.jobs.queue.queue_store import QueueStore
from shoal.plan.queueing.lease import BEAT_S, Lease, LeaseWatch
from shoal.plan.queueing.transitions import StaleEpochError
from shoal.spec.private_file import open_lock_file

LOCK_RETRY_S = 0.05


@contextlib.contextmanager
def daemon_lock(paths: QueuePaths, *, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the lock of the queue's daemon. SH641 if another process holds it for longer than `wait_s`."""
    refuse_network_file_system(paths)
    try:
        paths.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = open_lock_file(paths.lock)
    except OSError as failure:
        raise error("SH642", f"the lock cannot be used: {failure}", where=str(paths.lock)) from failure
    with file:
        deadline_s = time.monotonic() + wait_s
        while not _try_lock(file):
            if time.monotonic() >= deadline_s:
                raise already_served(paths)
            time.sleep(LOCK_RETRY_S)
        yield


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_served(paths: QueuePaths) -> bool:
    """Whether a live process of this machine holds the lock of the queue's daemon."""
    try:
        descriptor = os.open(paths.lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def already_served(paths: QueuePaths) -> ShoalError:
    return error("SH641", f"another process serves {paths.runs}", where=str(paths.lock))


def take_lease(store: QueueStore) -> Lease:
    """Take the lease with the next epoch, while holding the lock. Waits if a daemon of another machine has it and
    counts on; SH641 once that is certain."""
    watch = LeaseWatch()
    first = store.lease()
    while True:
        present = store.lease()
        if watch.is_free(present, time.monotonic(), holder_is_dead=_shares_kernel(present.holder)):
            with contextlib.suppress(StaleEpochError):
                return store.change_lease(
                    lambda old: old.taken(holder=holder_name(), pid=os.getpid()), expected=present
                )
        elif present != first:
            raise error("SH641", f"{present.holder} serves it", where=str(store.paths.file))
        time.sleep(min(BEAT_S, 1.0))


def holder_name() -> str:
    return f"{socket.gethostname()}/{_boot_id()}/{os.getpid()}"


def _shares_kernel(holder: str) -> bool:
    """Whether the holder ran on this machine: then, as this process has the lock, it is dead."""
    host, _, rest = holder.partition("/")
    return host == socket.gethostname() or rest.partition("/")[0] == _boot_id()


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
