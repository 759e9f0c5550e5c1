"""Commands to a run from another process: one message to the run's driver, one answer, then the run's events."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

from shoal.errors import ShoalError, error, plural
from shoal.events import Event, RunState, RunStateReader
from shoal.fleet.driver_address import DriverAddress, check_driver_address
from shoal.fleet.orphans import Orphan, find_orphans
from shoal.fleet.profile_request import ProfileRequest
from shoal.jobs import run_dir
from shoal.jobs.resume import has_finished
from shoal.net.address import format_address
from shoal.net.errors import LinkError, TlsError, TokenError
from shoal.net.listener import connect_host
from shoal.net.messages import MAX_MESSAGE_BYTES, decode_message, encode_message
from shoal.net.tls import TlsContexts
from shoal.spec.certificates import tls_contexts_for
from shoal.spec.job import MAX_WORKERS, Job
from shoal.spec.load import load_run_job
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Role, Seat

REPLY_TIMEOUT_S = 10.0
POLL_S = 0.05


@dataclass(frozen=True)
class RunStatus:
    """The answer to a command: the wanted numbers of workers and servers, the connected ones, and notes."""

    wanted: int
    lanes: int
    workers: list[int]
    stopping: str = ""
    servers_wanted: int = 0
    servers: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [*(f"worker-{s}" for s in self.workers), *(f"server-{s}" for s in self.servers)]


def scale(paths: RunPaths, wanted: int | None = None, *, servers: int | None = None) -> RunStatus:
    """Set the wanted number of workers, of servers, or both."""
    numbers = {who: n for who, n in (("wanted", wanted), ("servers", servers)) if n is not None}
    if not numbers:
        raise error("SH609", "no number of workers or servers", fix="Write shoal scale RUN 4, or --servers 2.")
    for who, number in numbers.items():
        if not 1 <= number <= MAX_WORKERS:
            name = "workers" if who == "wanted" else who
            raise error("SH609", f"{number} {name}", fix=f"Ask for 1 to {MAX_WORKERS}.")
    job = load_run_job(_without_folds(paths).job)
    if servers is not None and job.sync.kind != "server":
        raise error("SH609", f"'{paths.name}' has no servers: its sync is {job.sync.kind}", where="--servers")
    answer = _send_command(paths, "scale", **numbers)
    return replace(answer, notes=[] if wanted is None else _scale_notes(job, wanted, answer.lanes))


def _scale_notes(job: Job, wanted: int, lanes: int) -> list[str]:
    notes = []
    if wanted > lanes:
        notes.append(f"the run has {plural(lanes, 'lane')}: {wanted - lanes} of {wanted} workers will stand by")
    limits = job.workers
    if not limits.least <= wanted <= limits.most:
        notes.append(f"the job says workers: {limits.least}..{limits.most}; this counts until the run ends")
    return notes


def drain(paths: RunPaths, who: str) -> tuple[Seat, RunStatus]:
    """Let a worker or server leave once its state is held elsewhere. Returns its seat and the run's status; see
    `wait_for_departure`."""
    seat = _parse_seat(who)
    answer = _send_command(_without_folds(paths), "drain", seat=seat.number, role=seat.role)
    if seat.name not in answer.names:
        names = ", ".join(answer.names) or "none"
        raise error("SH613", f"'{paths.name}' has no {seat.name} now", where=who, fix=f"It has: {names}.")
    return seat, answer


def wait_for_departure(paths: RunPaths, seat: Seat) -> str:
    """Wait until a drained worker or server has exited. Returns how it exited, or '' if the run ended first."""
    reader = RunStateReader(paths.events, paths.state_snapshot)
    if how := _departed_before(reader.state, seat):
        return how
    return next(filter(None, (_departure(event, seat) for event in _follow_events(paths, reader))), "")


def _departure(event: Event, seat: Seat) -> str:
    """How the seat's process exited, if the event says it; else ''."""
    if event.kind == "left" and event.who == seat.name:
        return f"left at step {event.step}"
    if event.kind == "server_left" and event["server"] == seat.name:
        return "left"
    if event.kind == f"{seat.role}_died" and event[seat.role] == seat.name:
        return f"died: {event['reason']}"
    return ""


def _departed_before(state: RunState, seat: Seat) -> str:
    """How the seat's process exited before the snapshot that the state comes from; '' if it had not."""
    worker = state.workers.get(seat.name)
    if worker and worker.state == "left":
        return f"left at step {worker.step}"
    return next(filter(None, (_departure(event, seat) for event in reversed(state.notes))), "")


def stop(paths: RunPaths) -> RunState:
    """Ask the run to save and stop, and wait until it has ended. Returns its final state."""
    if paths.folds:
        _stop_folds(paths)
    else:
        _send_command(paths, "stop")
    reader = RunStateReader(paths.events, paths.state_snapshot)
    for _ in _follow_events(paths, reader):
        pass
    state = reader.state
    if state.status in ("starting", "training", "created"):
        state.status = "broken off"  # the driver was killed meanwhile
    return state


def _stop_folds(paths: RunPaths) -> None:
    """Send `stop` to the first fold that answers: one driver drives all folds, and stops them all."""
    for one in paths.folds:
        with contextlib.suppress(ShoalError):
            _send_command(one, "stop")
            return
    raise _not_driven(paths, "none of its folds answers")


def inspect(paths: RunPaths, profile: ProfileRequest | None = None) -> None:
    """Let the driver ask the workers without the run's directory for their stacks, or for a profile. What they send
    comes into the run's directory."""
    _send_command(_without_folds(paths), "inspect", profile=profile.model_dump() if profile else None)


def read_token(paths: RunPaths) -> str:
    contact = check_driver_address(_without_folds(paths).driver_address)
    if contact is None:
        raise error("SH612", f"'{paths.name}' has no token: no driver has run it yet", where=str(paths.root))
    return contact.token


def fetch_welcome(address: DriverAddress, *, tls_contexts: TlsContexts | None) -> dict[str, Any]:
    """The driver's welcome. Fails fast if the address or the token is wrong."""
    with _connection(address, tls_contexts=tls_contexts) as rows:
        return next(rows)


# ---- implementation ----


def _without_folds(paths: RunPaths) -> RunPaths:
    if paths.folds:
        raise error("SH614", f"'{paths.name}' has folds", fix=f"Name one of them, such as {paths.name}/fold-0.")
    return paths


def _parse_seat(who: str) -> Seat:
    found = re.fullmatch(r"(?:(worker|server)-)?(\d{1,9})", who)
    if not found:
        raise error("SH613", f"'{who}' is not a worker or server", fix="Write worker-2, or 2, or server-3.")
    return Seat(number=int(found[2]), role=cast(Role, found[1] or "worker"))


def _send_command(paths: RunPaths, kind: str, **fields: Any) -> RunStatus:
    if not run_dir.is_driven(paths.parent_run):
        raise _not_driven(paths)
    contact = check_driver_address(paths.driver_address)
    if contact is None:
        raise _not_driven(paths, "the driver has not written its address yet")
    contexts = tls_contexts_for(load_run_job(paths.job))
    try:
        with _connection(contact, encode_message(kind, fields), tls_contexts=contexts) as rows:
            next(rows)
            answer = RunStatus(**next(rows))
    except ShoalError as failure:
        raise _not_driven(paths, failure.message) from failure
    if answer.stopping and kind != "stop":
        raise error("SH612", f"'{paths.name}' is ending already ({answer.stopping})", where=str(paths.root))
    return answer


def _not_driven(paths: RunPaths, why: str = "") -> ShoalError:
    if has_finished(paths):
        return error("SH604", f"'{paths.name}' has finished", where=str(paths.root))
    message = f"no driver runs '{paths.name}'" + (f": {why}" if why else "")
    left = [] if run_dir.is_driven(paths.parent_run) else [f"{s.seat.name} (process {s.pid})" for s in _orphans(paths)]
    if not left:
        return error("SH612", message, where=str(paths.root))
    patience = load_run_job(paths.job).elastic.patience_s
    message += f"; these processes live and wait {patience:g} s for a driver: {', '.join(left)}"
    fix = f"Run `shoal resume {paths.name}`, which takes them over. Without a driver they save and exit."
    return error("SH612", message, where=str(paths.root), fix=fix)


def _orphans(paths: RunPaths) -> list[Orphan]:
    return [survivor for one in paths.folds or [paths] for survivor in find_orphans(one)]


@contextlib.contextmanager
def _connection(
    address: DriverAddress, *messages: bytes, tls_contexts: TlsContexts | None
) -> Iterator[Iterator[dict[str, Any]]]:
    """Iterates over the fields of the driver's welcome, then of its answers to `messages`."""
    hello = json.dumps({"role": "user", "key": address.key("user")}).encode()
    try:
        with connect_host(address.host, address.port, address.token, hello, tls_contexts=tls_contexts) as sock:
            sock.settimeout(REPLY_TIMEOUT_S)
            sock.sendall(b"".join(messages))
            yield _read_replies(sock)
    except TokenError as failure:
        raise error("SH615", f"the driver at {address.host}:{address.port} has another token") from failure
    except TlsError as failure:
        raise error("SH620", str(failure), where=format_address(address.host, address.port)) from failure
    except (LinkError, OSError) as failure:
        raise error("SH610", str(failure), where=format_address(address.host, address.port)) from failure


def _read_replies(sock: socket.socket) -> Iterator[dict[str, Any]]:
    until = time.monotonic() + REPLY_TIMEOUT_S
    with sock.makefile("rb") as lines:
        while time.monotonic() < until:
            line = lines.readline(MAX_MESSAGE_BYTES)
            if not line:
                raise LinkError("the driver closed the connection")
            row = decode_message(line)
            if row.kind in ("welcome", "answer"):
                yield row.fields
    raise LinkError(f"no answer in {REPLY_TIMEOUT_S:g} s")


def _follow_events(paths: RunPaths, reader: RunStateReader) -> Iterator[Event]:
    """The events after the reader's position, until the run's present driver is done."""
    since = time.time()
    while True:
        driven = run_dir.is_driven(paths.parent_run)
        for event in reader.read_new():
            yield event
            if event.kind == "run_ended" and event.t >= since and paths.parent_run is not paths:
                return  # other folds may still be running
        if not driven:
            return
        time.sleep(POLL_S)
