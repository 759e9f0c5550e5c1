"""What every process of a run does around its work: report errors, and hold the lock of its seat."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
from shoal.fleet.driver_address import DriverAddress
from shoal.fleet.messages import printable
from shoal.fleet.platform_facts import describe_difference
from shoal.fleet.stack_dumps import answer_stack_requests
from shoal.net.address import parse_address
from shoal.net.errors import LinkError
from shoal.net.listener import connect_host
from shoal.net.tls import TlsContexts
from shoal.spec.private_file import open_lock_file
from shoal.spec.resolve import calling_user_line, is_users_failure, user_line
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Role, Seat

WELCOME_TIMEOUT_S = 30.0
HOST_VARIABLE = "SHOAL_HOST"
"""What an engine calls the host of a process; empty: ask the host."""
TOKEN_VARIABLE = "SHOAL_TOKEN"  # noqa: S105
KEY_VARIABLE = "SHOAL_SEAT_KEY"


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
    """Emit `failed` for each error. An error without a place is located at this process. The host of an engine stands
    beside the fix: what failed has the same message wherever it fails, and only one host may lack a package."""
    host = os.environ.get(HOST_VARIABLE)
    beside = "" if host is None else f" It was on host {host or socket.gethostname()}."
    for one in single_errors(failure):
        place = stream.who if stream.who.startswith(("worker-", "server-")) else ""
        stream.emit("failed", code=one.code, message=one.message, where=one.where or place, fix=one.fix + beside)


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


def other_bits_error(of_run: object, own: dict[str, str]) -> ShoalError | None:
    """SH654 if this process, with its `own` facts, would compute other bits than the run's. None if the run's facts are
    unknown. They come over the network."""
    facts = of_run if isinstance(of_run, dict) else {}
    if not facts or not (difference := describe_difference(facts, own)):
        return None
    return error("SH654", f"the run and {socket.gethostname()} differ: {printable(difference)}")


@dataclass(frozen=True)
class ApartIdentity:
    """What a process of the engine has instead of the run's directory: where its driver is, and the key of its seat."""

    seat: Seat
    driver: DriverAddress
    key: str = field(repr=False)
    tls_contexts: TlsContexts | None = None

    @classmethod
    def from_environment(cls, seat: Seat, driver: str, tls_contexts: TlsContexts | None) -> ApartIdentity:
        """Takes the secrets out of the environment, so that no child inherits them."""
        address = DriverAddress(*parse_address(driver), os.environ.pop(TOKEN_VARIABLE, ""))
        return cls(seat, address, os.environ.pop(KEY_VARIABLE, ""), tls_contexts)

    def connect_for_files(self) -> socket.socket:
        """A connection for files. OSError if the driver cannot be reached."""
        fields = {"role": "files", "process": self.seat.role, "seat": self.seat.number, "key": self.key}
        host, port, token = self.driver.host, self.driver.port, self.driver.token
        try:
            return connect_host(host, port, token, json.dumps(fields).encode(), tls_contexts=self.tls_contexts)
        except LinkError as failure:
            raise ConnectionError(f"the driver cannot be asked for files: {failure}") from failure


def own_address(driver_address: DriverAddress) -> str:
    """The address of this machine on its route to the driver. Nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(driver_address.host, driver_address.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(address)
        return str(sock.getsockname()[0])


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
