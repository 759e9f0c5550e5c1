"""What a user asks of a run from another process: one wish to its driver, one answer; then watch it come true."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

from shoal.errors import ShoalError, error
from shoal.events import Event, Picture, Reader, fold
from shoal.fleet.contact import Contact, read_contact
from shoal.fleet.survivors import Survivor, survivors
from shoal.jobs import directory
from shoal.spec.certificates import certificates_of
from shoal.spec.job import MOST_WORKERS, Job
from shoal.spec.load import load_job
from shoal.spec.paths import RunPaths
from shoal.spec.view import Role, Seat
from shoal.wire import tls
from shoal.wire.door import call_host
from shoal.wire.handshake import LinkError, TlsError, TokenError
from shoal.wire.rows import LONGEST_ROW_BYTES, pack, unpack

ANSWER_S = 10.0
LOOK_S = 0.05


@dataclass(frozen=True)
class Answer:
    """How things stand after a wish: how many workers and servers are wanted, who is there, and what else is worth
    saying."""

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


def scale(paths: RunPaths, wanted: int | None = None, *, servers: int | None = None) -> Answer:
    """Another number of workers, or of servers, or both, from now on."""
    numbers = {who: n for who, n in (("wanted", wanted), ("servers", servers)) if n is not None}
    if not numbers:
        raise error("SH609", "no number of workers or servers", fix="Write shoal scale RUN 4, or --servers 2.")
    for who, number in numbers.items():
        if not 1 <= number <= MOST_WORKERS:
            name = "workers" if who == "wanted" else who
            raise error("SH609", f"{number} {name}", fix=f"Ask for 1 to {MOST_WORKERS}.")
    job = load_job(_one_run(paths).job, check_names=False)
    if servers is not None and job.sync.kind != "server":
        raise error("SH609", f"'{paths.name}' has no servers: its sync is {job.sync.kind}", where="--servers")
    answer = _wish(paths, "scale", **numbers)
    return replace(answer, notes=[] if wanted is None else _remarks(job, wanted, answer.lanes))


def _remarks(job: Job, wanted: int, lanes: int) -> list[str]:
    notes = []
    if wanted > lanes:
        notes.append(f"there are {lanes} lanes: {wanted - lanes} of {wanted} workers will stand by")
    limits = job.workers
    if not limits.least <= wanted <= limits.most:
        notes.append(f"the job says workers: {limits.least}..{limits.most}; this counts until the run ends")
    return notes


def drain(paths: RunPaths, who: str) -> tuple[Seat, Answer]:
    """Let a worker or server go when others have what it holds: its seat, and how things stand. See `departure`."""
    seat = _seat(who)
    answer = _wish(_one_run(paths), "drain", seat=seat.number, role=seat.role)
    if seat.name not in answer.names:
        names = ", ".join(answer.names) or "none"
        raise error("SH613", f"'{paths.name}' has no {seat.name} now", where=who, fix=f"It has: {names}.")
    return seat, answer


def departure(paths: RunPaths, seat: Seat) -> str:
    """Waits until one that was asked to go has gone; how it went, or '' if the run ended first."""
    for event in _happening(paths):
        if event.kind == "left" and event.who == seat.name:
            return f"left at step {event.step}"
        if event.kind == "server_left" and event["server"] == seat.name:
            return "left"
        if event.kind == f"{seat.role}_died" and event[seat.role] == seat.name:
            return f"died: {event['reason']}"
    return ""


def stop(paths: RunPaths) -> Picture:
    """Let everybody save and leave, and wait until the run has ended: the run as it is then."""
    if paths.folds:
        _stop_folds(paths)
    else:
        _wish(paths, "stop")
    picture = fold(_happening(paths))
    if picture.status in ("starting", "training", "created"):
        picture.status = "broken off"  # its driver was killed meanwhile
    return picture


def _stop_folds(paths: RunPaths) -> None:
    """One driver drives all folds: whichever of them hears it stops them all."""
    for one in paths.folds:
        with contextlib.suppress(ShoalError):
            _wish(one, "stop")
            return
    raise _not_driven(paths, "none of its folds answers")


def token(paths: RunPaths) -> str:
    contact = read_contact(_one_run(paths).control)
    if contact is None:
        raise error("SH612", f"'{paths.name}' was never driven: it has no token", where=str(paths.root))
    return contact.token


def greet(contact: Contact) -> dict[str, Any]:
    """The driver's welcome. Says quickly what is wrong with an address or a token."""
    with _conversation(contact) as rows:
        return next(rows)


# ---- how it is done ----


def _one_run(paths: RunPaths) -> RunPaths:
    if paths.folds:
        raise error("SH614", f"'{paths.name}' has folds", fix=f"Name one of them, such as {paths.name}/fold-0.")
    return paths


def _seat(who: str) -> Seat:
    found = re.fullmatch(r"(?:(worker|server)-)?(\d{1,9})", who)
    if not found:
        raise error("SH613", f"'{who}' is not a worker or server", fix="Write worker-2, or 2, or server-3.")
    return Seat(number=int(found[2]), role=cast(Role, found[1] or "worker"))


def _wish(paths: RunPaths, kind: str, **fields: Any) -> Answer:
    contact = read_contact(paths.control)
    if contact is None or not directory.is_driven(paths.whole):
        raise _not_driven(paths)
    tls.use(certificates_of(load_job(paths.job, check_names=False)))
    try:
        with _conversation(contact, pack(kind, fields)) as rows:
            next(rows)
            answer = Answer(**next(rows))
    except ShoalError as failure:
        raise _not_driven(paths, failure.message) from failure
    if answer.stopping and kind != "stop":
        raise error("SH612", f"'{paths.name}' is ending already ({answer.stopping})", where=str(paths.root))
    return answer


def _not_driven(paths: RunPaths, why: str = "") -> ShoalError:
    if paths.receipt.is_file():
        return error("SH604", f"'{paths.name}' has finished", where=str(paths.root))
    message = f"nobody drives '{paths.name}'" + (f": {why}" if why else "")
    left = [] if directory.is_driven(paths.whole) else [f"{s.seat.name} (process {s.pid})" for s in _alone(paths)]
    if not left:
        return error("SH612", message, where=str(paths.root))
    patience = load_job(paths.job, check_names=False).engine.patience_s
    message += f"; still there, and waiting {patience:g} s for a driver: {', '.join(left)}"
    fix = f"`shoal resume {paths.name}` takes them over; without it they save and leave by themselves."
    return error("SH612", message, where=str(paths.root), fix=fix)


def _alone(paths: RunPaths) -> list[Survivor]:
    return [survivor for one in paths.folds or [paths] for survivor in survivors(one)]


@contextlib.contextmanager
def _conversation(contact: Contact, *said: bytes) -> Iterator[Iterator[dict[str, Any]]]:
    """The fields of the driver's welcome, then of its answers to what was said."""
    hello = json.dumps({"role": "user"}).encode()
    try:
        with call_host(contact.host, contact.port, contact.token, hello) as sock:
            sock.settimeout(ANSWER_S)
            sock.sendall(b"".join(said))
            yield _answers(sock)
    except TokenError as failure:
        raise error("SH615", f"the driver at {contact.host}:{contact.port} has another token") from failure
    except TlsError as failure:
        raise error("SH620", str(failure), where=f"{contact.host}:{contact.port}") from failure
    except (LinkError, OSError) as failure:
        raise error("SH610", str(failure), where=f"{contact.host}:{contact.port}") from failure


def _answers(sock: socket.socket) -> Iterator[dict[str, Any]]:
    until = time.monotonic() + ANSWER_S
    with sock.makefile("rb") as lines:
        while time.monotonic() < until:
            line = lines.readline(LONGEST_ROW_BYTES)
            if not line:
                raise LinkError("the driver closed the connection")
            row = unpack(line)
            if row.kind in ("welcome", "answer"):
                yield row.fields
    raise LinkError(f"no answer in {ANSWER_S:g} s")


def _happening(paths: RunPaths) -> Iterator[Event]:
    """Everything from the run's beginning on, until this start of it is over."""
    since = time.time()
    reader = Reader(paths.events)
    while True:
        driven = directory.is_driven(paths.whole)
        for event in reader.new():
            yield event
            if event.kind == "run_ended" and event.t >= since and paths.whole is not paths:
                return  # its folds may go on
        if not driven:
            return
        time.sleep(LOOK_S)
