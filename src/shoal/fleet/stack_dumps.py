"""Stacks of a process of a run, on request: a signal lets it write where each of its threads is.

The handler runs in C, between two instructions of the process. So it needs no privileges, no lock of the interpreter
and no turn of the training thread: a process that waits for a socket or hangs in C answers too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
from collections.abc import Iterator
from pathlib import Path

STACK_SIGNAL = signal.SIGRTMIN + 8
"""Schedulers send SIGUSR1 and SIGUSR2 to warn a process; this one is free."""


@contextlib.contextmanager
def answer_stack_requests(path: Path) -> Iterator[None]:
    """While this is open, the signal appends the stacks of all threads to the file. Without the file (a full or
    read-only disk) the signal is ignored."""
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # also afterwards: a late request must not end the process
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(os.open(path, flags, 0o644), "ab", buffering=0)
    except OSError:
        yield
        return
    with file:
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=False)
        try:
            yield
        finally:
            faulthandler.unregister(STACK_SIGNAL)


def answers_stack_requests(pid: int) -> bool:
    """Whether a process of this machine has a handler for the signal, which would end any other process."""
    caught = _status_field(pid, "SigCgt")
    return bool(caught) and bool(int(caught, 16) >> (STACK_SIGNAL - 1) & 1)


def is_frozen(pid: int) -> bool:
    """Whether the process is stopped (SIGSTOP, a debugger, a frozen cgroup of v1)."""
    return _status_field(pid, "State")[:1] in ("T", "t")


def _status_field(pid: int, name: str) -> str:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:")), "")
