"""The worker process: `python -m shoal.train.worker --seat 0 --run DIR`. Started by an engine, never by hand.

A worker from elsewhere is started with `--join HOST:PORT` instead of a seat: its seat, the job and the way back for
what it has to tell come from the driver. The token comes through the environment, where no other user sees it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import platform
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.digest import state_sha256, weights_sha256
from shoal.checkpoint.export import export_model, export_pieces
from shoal.errors import EXIT_BUG, ShoalError, each
from shoal.events import Stream
from shoal.events.stream import parse
from shoal.fleet.contact import Contact, read_contact
from shoal.fleet.tie import Tie
from shoal.parallel.peers import Peers
from shoal.parallel.sync.server import ServerSync
from shoal.spec.certificates import certificates_of, read_certificates
from shoal.spec.job import Job
from shoal.spec.load import load_job, save_job
from shoal.spec.paths import RunPaths, cache_directory
from shoal.spec.table import Table
from shoal.spec.view import Role, View
from shoal.train.build import Built, build, build_loop
from shoal.train.devices import take_device
from shoal.train.heap import keep_memory
from shoal.train.loop import Loop
from shoal.train.pulse import Pulse
from shoal.train.voyage import Voyage
from shoal.wire import tls

TOKEN_VARIABLE = "SHOAL_TOKEN"  # noqa: S105
WELCOME_S = 30.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="shoal.train.worker")
    parser.add_argument("--seat", type=int)
    parser.add_argument("--run", required=True)
    parser.add_argument("--join", default="")
    parser.add_argument("--dir", default=".")
    parser.add_argument("--tls", type=Path)
    parser.add_argument("--trace", action="store_true")
    arguments = parser.parse_args()
    paths = RunPaths.at(arguments.run)
    if arguments.join:
        tls.use(read_certificates(arguments.tls, where="--tls") if arguments.tls else None)
        sys.exit(join(paths, arguments.join, arguments.dir))
    who = f"worker-{arguments.seat}"
    sys.exit(
        guarded(Stream(paths.events, who), lambda stream: work(paths, arguments.seat, stream, trace=arguments.trace))
    )


def guarded(stream: Stream, act: Callable[[Stream], None]) -> int:
    """Run it; what goes wrong is told in the stream, and the exit code says whose fault it was."""
    try:
        act(stream)
    except ShoalError as failure:
        tell_failure(stream, failure)
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


def tell_failure(stream: Stream, failure: ShoalError) -> None:
    for one in each(failure):
        stream.emit("failed", code=one.code, message=one.message, where=one.where, fix=one.fix)


@dataclass
class Identity:
    """Who this worker is to its driver. `moved` is called when the driver gives it another seat, `seen` with each
    new view, `placed` with each new table of servers; all in the tie's thread. Every driver is told the `cuts`."""

    contact: Callable[[], Contact | None]
    peers: Peers
    pulse: Pulse
    local: bool
    seat: int | None = None
    leaving: bool = False
    moved: Callable[[int], None] = lambda seat: None
    seen: Callable[[View], None] = lambda view: None
    placed: Callable[[Table], None] = lambda table: None
    cuts: list[int] = field(default_factory=list)

    def tie(self) -> Tie:
        tie = Tie(
            self.contact,
            lambda: self._hello(tie),
            beat=self._beat,
            on_view=lambda view: self.seen(view),  # noqa: PLW0108  # it is set later
            on_table=lambda table: self.placed(table),  # noqa: PLW0108
            on_welcome=lambda fields: self._welcomed(tie, fields),
        )
        return tie

    def _hello(self, tie: Tie) -> dict[str, Any]:
        return {
            "role": "worker",
            "seat": self.seat,
            "local": self.local,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "address": self.peers.endpoint.address.model_dump(),
            "view": tie.view.number if tie.view else 0,
            "training": self.pulse.phase not in ("building", "waiting"),
            "table": tie.table.model_dump(mode="json") if tie.table else None,
        }

    def _beat(self) -> dict[str, Any]:
        return self.pulse.beat() | ({"leaving": True} if self.leaving else {}) | self.peers.facts()

    def _welcomed(self, tie: Tie, fields: dict[str, Any]) -> None:
        if self.cuts:
            tie.say("cuts", cuts=self.cuts)
        seat = int(fields["seat"])
        if self.seat is not None and seat != self.seat:
            self.moved(seat)
        self.seat = seat


def work(paths: RunPaths, seat: int, stream: Stream, *, trace: bool = False) -> None:
    """A worker with the run's directory at hand."""
    contact = read_contact(paths.control)
    assert contact is not None, "the driver writes it before it starts workers"
    latest = partial(read_contact, paths.control)
    job = load_job(paths.job, check_names=False)
    tls.use(certificates_of(job))
    with seat_taken(paths, seat), meeting(contact, latest, local=True, seat=seat) as (me, tie):
        tie.connect(WELCOME_S)
        train(job, paths, me, tie, stream, trace=trace)


def join(paths: RunPaths, where: str, base_dir: str) -> int:
    """A worker from elsewhere. What it tells is kept in its own directory too, for whoever started it."""
    host, _, port = where.rpartition(":")
    contact = Contact(host.strip("[]"), int(port), os.environ.pop(TOKEN_VARIABLE, ""))
    kept = Stream(paths.events, "worker")
    with meeting(contact, lambda: contact, local=False, seat=None) as (me, tie):
        try:
            welcome = tie.connect(WELCOME_S)
        except ShoalError as failure:
            tell_failure(kept, failure)
            print(failure, file=sys.stderr)
            return failure.exit_code
        stream = Stream.through(lambda row: tell_both(tie, kept, row), f"worker-{me.seat}")
        job = Job.model_validate(welcome["job"]).model_copy(update={"base_dir": str(Path(base_dir).resolve())})
        save_job(job, paths.job)
        print(f"joined run {welcome['run']} as worker-{me.seat}", flush=True)
        code = guarded(stream, lambda stream: train(job, paths, me, tie, stream))
        tie.say("bye")  # else the driver would take it for dead
        return code


def tell_both(tie: Tie, kept: Stream, row: bytes) -> None:
    """Steps are for the driver alone: there is no end to them."""
    tie.say("event", row=row.decode())
    event = parse(row)
    if event is not None and event.kind != "step":
        kept.pass_on(event)


@contextlib.contextmanager
def meeting(
    first: Contact, contact: Callable[[], Contact | None], *, local: bool, seat: int | None
) -> Iterator[tuple[Identity, Tie]]:
    """The two ways out of this process: to the driver, and to the other workers."""
    peers = Peers(first.token, bind=own_address(first))
    me = Identity(contact, peers, Pulse(), local, seat)
    tie = me.tie()
    try:
        yield me, tie
    finally:
        tie.close()
        peers.close()


def own_address(contact: Contact) -> str:
    """The address of this machine on the way to the driver. Nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(contact.host, contact.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(address)
        return str(sock.getsockname()[0])


def train(job: Job, paths: RunPaths, me: Identity, tie: Tie, stream: Stream, *, trace: bool = False) -> None:
    """Build, then go through the loop to the end."""
    assert me.seat is not None
    asked_to_leave = listen_for_the_end(me, tie, job.engine.patience_s)
    prepare_torch(job)
    stream.emit(
        "worker_started",
        pid=os.getpid(),
        host=socket.gethostname(),
        threads=job.threads,
        torch=torch.__version__,
    )
    built = build(job, cache_dir=cache_directory(), tell=stream.emit, pick=take_device)
    loop = build_loop(
        built,
        paths,
        membership=tie,
        peers=me.peers,
        stream=stream,
        pulse=me.pulse,
        holds=me.local and built.mould is None,
        conclude=lambda loop, why: finish(loop, why, built, paths),
        asked_to_leave=asked_to_leave,
        trace=trace,
    )
    if isinstance(loop.sync, ServerSync):
        use_servers(me, tie, loop.sync)
    voyage = Voyage(loop, tie, seat=me.seat, lock=paths.saving_lock if me.local else None)
    me.seen, me.moved = voyage.halt, voyage.move
    try:
        voyage.run()
    finally:
        loop.feed.close()
        loop.store.close()


def use_servers(me: Identity, tie: Tie, sync: ServerSync) -> None:
    """Let the driver know what is to be placed, and the sync where it was placed."""
    me.placed = sync.learn
    if tie.table is not None:
        sync.learn(tie.table)
    me.cuts = sync.cuts
    tie.say("cuts", cuts=me.cuts)


@contextlib.contextmanager
def seat_taken(paths: RunPaths, seat: int, *, role: Role = "worker") -> Iterator[None]:
    """A lock that lasts as long as this process, so that another driver can see who is still here."""
    with paths.seat_lock(seat, role).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(str(os.getpid()))
        lock.flush()
        yield
        paths.seat_lock(seat, role).unlink(missing_ok=True)


def prepare_torch(job: Job) -> None:
    """The same arithmetic everywhere: a fixed number of threads, deterministic kernels."""
    keep_memory()
    torch.set_num_threads(job.threads)
    if job.threads > 1 or torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False


def listen_for_the_end(me: Identity, tie: Tie, patience_s: float) -> Callable[[], str]:
    """Why this worker must leave by itself. SIGTERM, as spot machines send it, is told to the driver, who lets it go
    when others have what it holds; only where there is no driver it leaves at once."""

    def terminated(*_: object) -> None:
        me.leaving = True

    signal.signal(signal.SIGTERM, terminated)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def why() -> str:
        if me.leaving and tie.alone_s > 0:
            return "terminated"
        return f"no driver came back in {patience_s:g} s" if tie.alone_s > patience_s else ""

    return why


def together(sha256: str, sealed: str) -> str:
    """Of what the replica has, and of what it has not: rows of sparse tables."""
    return hashlib.sha256(f"{sha256} {sealed}".encode()).hexdigest() if sealed else sha256


def finish(loop: Loop, why: str, built: Built, paths: RunPaths) -> None:
    """Save, export, and say so. Every part may be repeated after a crash."""
    loop.save(force=True)
    model, shards = loop.replica.model, loop.shards
    if shards:
        loop.store.wait()  # what is exported is what was saved
    weights = together(weights_sha256(shards.weights() if shards else model.state_dict()), loop.sealed)
    how: dict[str, Any] = {
        "program": "program" in built.job.export,
        "tell": loop.teller.tell,
        "info": {
            "job": built.job.dump(),
            "step": loop.step,
            "weights_sha256": weights,
            "metrics": loop.metrics,
            "classes": built.data.train.source.classes,
        },
    }
    if shards:
        export_pieces(paths.model, shards.weights(), **how)
    else:
        export_model(paths.model, model, example_inputs=built.example.inputs, **how)
    loop.store.wait()
    loop.teller.tell(
        "finished",
        step=loop.step,
        weights_sha256=weights,
        state_sha256=shards.state_sha256() if shards else together(state_sha256(loop.replica.state()), loop.sealed),
        samples_seen=built.dealer.samples_before(loop.step),
        metrics=loop.metrics,
        stopped=why,
        platform={
            "machine": platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cpu": torch.backends.cpu.get_cpu_capability(),
        },
    )


if __name__ == "__main__":
    main()
