"""What every process of a run does around its work: report errors, and hold the lock of its seat."""

from __future__ import annotations

import contextlib
import fcntl
import os
import traceback
from collections.abc import Callable, Iterator

from shoal.errors import EXIT_BUG, ShoalError, single_errors
from shoal.events import EventWriter
from shoal.spec.private_file import open_lock_file
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Role

WELCOME_TIMEOUT_S = 30.0


def run_reporting_errors(stream: EventWriter, act: Callable[[EventWriter], None]) -> int:
    """Call `act`. An exception becomes a `failed` event; the exit code distinguishes user errors from bugs."""
    try:
        act(stream)
    except ShoalError as failure:
        emit_failure(stream, failure)
        traceback.print_exc()
        return failure.exit_code
    except BaseException as failure:
        stream.emit(
            "failed",
            code="BUG",
            message=f"{type(failure).__name__}: {failure}",
            where=traceback.format_exc(),
            fix="",
        )
        traceback.print_exc()
        return EXIT_BUG
    finally:
        stream.close()
    return 0


def emit_failure(stream: EventWriter, failure: ShoalError) -> None:
    for one in single_errors(failure):
        stream.emit("failed", code=one.code, message=one.message, where=one.where, fix=one.fix)


@contextlib.contextmanager
def hold_seat_lock(paths: RunPaths, seat: int, *, role: Role = "worker") -> Iterator[None]:
    """Hold the seat's lock as long as this process lives, so that another driver can find it."""
    with open_lock_file(paths.seat_lock(seat, role)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield
        paths.seat_lock(seat, role).unlink(missing_ok=True)
