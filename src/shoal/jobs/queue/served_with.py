"""With which options of `shoal up` a queue was served last. A daemon without them would run its jobs elsewhere."""

from __future__ import annotations

from shoal.errors import error
from shoal.jobs.queue.daemon_lock import is_served
from shoal.jobs.queue.queue_file import QueuePaths
from shoal.spec.run_paths import write_atomically

MAX_CHARACTERS = 1000


def note_options(paths: QueuePaths, options: str) -> None:
    """For the daemon: `options` decide where jobs run; '' if each runs with its own engine."""
    if _read(paths) != options:
        write_atomically(paths.served_with, f"{options}\n")


def refuse_other_daemon(paths: QueuePaths) -> None:
    """SH648 if no daemon lives and one in the background would run the jobs elsewhere than the last one did."""
    if (options := _read(paths)) and not is_served(paths):
        message = f"the queue was last served by `shoal up {options}`: without that, its jobs would run elsewhere"
        fix = "Start that again. Or run `shoal up` once, and each job has the engine of its own job file again."
        raise error("SH648", message, where=str(paths.runs), fix=fix)


def _read(paths: QueuePaths) -> str:
    try:
        with paths.served_with.open(encoding="utf-8", errors="replace") as file:
            line = file.read(MAX_CHARACTERS).strip()
    except OSError:
        return ""
    return "".join(letter if letter.isprintable() else "?" for letter in line)
