"""What every process of a run does around its work: report errors, and hold the lock of its seat."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from shoal.errors import (
    EXIT_BUG,
    EXIT_CHECKPOINT,
    EXIT_OK,
    EXIT_RUN,
    ShoalError,
    describe_exception,
    error,
    from_os_error,
    single_errors,
    traceback_text,
)
from shoal.events import EventWriter
from shoal.fleet.control_client import ControlClient
from shoal.fleet.stack_dumps import answer_stack_requests
from shoal.spec.private_file import open_lock_file
from shoal.spec.resolve import calling_user_line, is_users_failure, user_line
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Role

WELCOME_TIMEOUT_S = 30.0


class NotWelcomeError(Exception):
    """The driver does not welcome this process: an earlier driver started it, and was killed before it connected."""


def run_reporting_errors(stream: EventWriter, act: Callable[[EventWriter], None]) -> int:
    """Call `act`. An exception becomes a `failed` event; the exit code distinguishes user errors from bugs."""
    try:
        with _report_hard_exits(stream):
            act(stream)
    except NotWelcomeError as failure:
        print(failure, file=sys.stderr)
        return EXIT_RUN  # the run goes on without this process; a driver that started it sees the exit
    except BaseException as failure:
        text = traceback_text(failure)
        known = as_user_error(failure)
        if known is None:
            stream.emit("failed", code="BUG", message=describe_exception(failure), where=text, fix="")
        else:
            emit_failure(stream, known)
        print(text, file=sys.stderr)
        return EXIT_BUG if known is None else known.exit_code
    finally:
        stream.close()
    return EXIT_CHECKPOINT if stream.unwritten_rows else EXIT_OK  # the driver must not miss its last events


def as_user_error(failure: BaseException) -> ShoalError | None:
    """The error that the user can act on: a full disk or memory, a limit, or a failure in the user's own code; None for
    a bug."""
    if isinstance(failure, ShoalError):
        return failure
    if limit := from_os_error(failure):
        return limit
    where = user_line(failure)
    if isinstance(failure, MemoryError):
        return error("SH407", describe_exception(failure), where=where)
    if not where or not is_users_failure(failure):
        return None
    code = "SH429" if isinstance(failure, Exception) else "SH428"
    return error(code, describe_exception(failure), where=where)


def emit_failure(stream: EventWriter, failure: ShoalError) -> None:
    """Emit `failed` for each error. An error without a place is located at this process."""
    for one in single_errors(failure):
        place = stream.who if stream.who.startswith(("worker-", "server-")) else ""
        stream.emit("failed", code=one.code, message=one.message, where=one.where or place, fix=one.fix)


@contextlib.contextmanager
def _report_hard_exits(stream: EventWriter) -> Iterator[None]:
    """Report `os._exit` of the user's code, which ends the process without an exception. Forks exit unreported."""
    exit_now, owner = os._exit, os.getpid()

    def report_and_exit(status: int) -> NoReturn:
        if os.getpid() != owner:
            exit_now(status)
        failure = error("SH428", f"os._exit({status}) was called", where=calling_user_line())
        emit_failure(stream, failure)
        exit_now(failure.exit_code)

    os._exit = report_and_exit
    try:
        yield
    finally:
        os._exit = exit_now


def connect_to_driver(control: ControlClient) -> None:
    """Connect a process that the engine started. NotWelcomeError if the driver does not welcome it."""
    try:
        control.connect(WELCOME_TIMEOUT_S)
    except ShoalError as failure:
        raise NotWelcomeError(str(failure)) from failure


@contextlib.contextmanager
def hold_seat_lock(paths: RunPaths, seat: int, *, role: Role = "worker") -> Iterator[None]:
    """Hold the seat's lock as long as this process lives, so that another driver can find it. A user of this machine
    who finds it may ask for its stacks."""
    with answer_stack_requests(paths.stacks(seat, role)), open_lock_file(paths.seat_lock(seat, role)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield
        paths.seat_lock(seat, role).unlink(missing_ok=True)
