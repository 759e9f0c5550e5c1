"""The daemon in the background: the first `shoal submit` starts it, and a guard starts it again when it was killed.

Clients import this, and the daemon serves clients, so this imports nothing of the daemon: it starts it by name.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from shoal.errors import EXIT_OK, error
from shoal.jobs.queue.daemon_lock import is_served
from shoal.jobs.queue.queue_file import QueuePaths
from shoal.jobs.queue.queue_store import QueueStore
from shoal.jobs.queue.served_with import refuse_other_daemon
from shoal.plan.queueing.transitions import MAX_FRUITLESS

IDLE_S = 60.0
"""Seconds after which a background daemon with nothing to do ends."""
START_TIMEOUT_S = 30.0
POLL_S = 0.02
LONG_LIFE_S = 60.0
"""A daemon that was killed after so many seconds is started again, however often it was killed before."""


def ensure_served(paths: QueuePaths) -> bool:
    """Start a daemon in the background unless one serves the queue. Returns whether it was started. SH648 if it does
    not start, or would run the jobs elsewhere than the last one did.

    It must be called after the change that the daemon is to see: a daemon that ends gives the lease back in a
    transaction of its own, and this one then finds no holder.
    """
    with QueueStore(paths) as store:
        if store.lease().holder and is_served(paths):
            return False
        refuse_other_daemon(paths)
        process = _spawn(paths)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not (store.lease().holder and is_served(paths)):
            if process.poll() is not None and process.returncode != EXIT_OK:
                last = paths.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
                raise error("SH648", "; ".join(last) or f"exit code {process.returncode}", where=str(paths.log))
            if time.monotonic() > deadline_s:
                raise error("SH648", f"no sign of it in {START_TIMEOUT_S:g} s", where=str(paths.log))
            time.sleep(POLL_S)
    return True


def _spawn(paths: QueuePaths) -> subprocess.Popen[bytes]:
    """A guard in a session of its own, with no terminal: it outlives this process, and listens nowhere."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(paths.log, flags, 0o600), "ab") as log:
        return subprocess.Popen(
            _command(paths, "--guard"),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=paths.runs.parent,
            start_new_session=True,
        )


def _command(paths: QueuePaths, *words: str) -> list[str]:
    idle_s = os.environ.get("SHOAL_QUEUE_IDLE_S", f"{IDLE_S:g}")
    return [sys.executable, "-P", "-m", "shoal.jobs.queue.serve", str(paths.runs), "--idle-s", idle_s, *words]


def guard(paths: QueuePaths) -> int:
    """Start the daemon, and start it again when it was killed: its jobs are resumed. Returns its exit code."""
    early_deaths = 0
    while True:
        began_s = time.monotonic()
        code = subprocess.call(_command(paths))
        lived_long = time.monotonic() - began_s >= LONG_LIFE_S
        early_deaths = 0 if lived_long else early_deaths + 1
        if not restart_after(code, early_deaths):
            return code
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        print(f"the daemon ended by {how} and is started again", flush=True)


def restart_after(code: int, early_deaths: int) -> bool:
    """Whether a daemon is started again. A job that kills it is held after MAX_FRUITLESS times; then it must still
    live."""
    killed_or_bug = code < 0 or code == 1
    return killed_or_bug and early_deaths <= 2 * MAX_FRUITLESS
