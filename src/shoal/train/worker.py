"""The worker process: `python -m shoal.train.worker --seat 0 --run DIR`. Started by an engine, never by hand.

A worker without the run's directory is started with `--join HOST:PORT`. The driver sends it the job, and receives its
events. The token comes through the environment, where other users cannot see it. If the key of its seat does too, the
run's engine started it: then it can do whatever a worker with the directory can, through the driver. Otherwise the
driver gives it a seat, and `--seat` is only its number among the workers of `shoal join`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.driver_files import DriverConnections
from shoal.collectives.peer_services import PeerServices
from shoal.errors import ShoalError
from shoal.events import EventWriter
from shoal.events.stream import parse_event
from shoal.fleet.control_client import ControlClient
from shoal.fleet.driver_address import DriverAddress, read_driver_address
from shoal.fleet.platform_facts import platform_facts
from shoal.fleet.process_limits import apply_limits
from shoal.fleet.process_main import (
    KEY_VARIABLE,
    TOKEN_VARIABLE,
    WELCOME_TIMEOUT_S,
    ApartIdentity,
    connect_to_driver,
    emit_failure,
    hold_seat_lock,
    other_bits_error,
    own_address,
    run_reporting_errors,
)
from shoal.fleet.remote_inspection import InspectedWorker
from shoal.fleet.usage import UsageSampler
from shoal.lanes.torch_setup import prepare_torch, tell_missing_kernels
from shoal.net.address import parse_address
from shoal.net.handshake import new_token
from shoal.net.tls import TlsContexts
from shoal.spec.certificates import load_tls_contexts, tls_contexts_for
from shoal.spec.chunk_table import ChunkTable
from shoal.spec.engine import parse_ports
from shoal.spec.job import Job
from shoal.spec.load import load_run_job, save_job
from shoal.spec.remote.file_requests import RemoteRun
from shoal.spec.run_paths import RunPaths, cache_directory
from shoal.spec.trust import CodeTrust, require_trust
from shoal.spec.view import Attachment, Seat, View
from shoal.train.activity import Activity
from shoal.train.build import TrainingSession, build, build_loop
from shoal.train.devices import claim_device, device_memory
from shoal.train.elastic import ElasticLoop
from shoal.train.fetch_code import fetch_job
from shoal.train.run_output import DirectoryOutput, DriverOutput, RunOutput
from shoal.train.step_profiler import StepProfiler

AGENT_VARIABLE = "SHOAL_AGENT"
STARTED_BY_ENGINE = Attachment(managed=True, can_save=True, needs_job=False)
STARTED_APART = Attachment(managed=True, can_save=True, needs_job=True)
JOINED = Attachment(managed=False, can_save=False, needs_job=True)

_exit_now = os._exit  # that of user code is an error, and is replaced


def on_early_sigterm(*_: object) -> None:
    """Until it trains, a worker leaves without handing anything over."""
    _exit_now(0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="shoal.train.worker")
    parser.add_argument("--seat", type=int)
    parser.add_argument("--run", required=True)
    parser.add_argument("--join", default="")
    parser.add_argument("--dir", default=".")
    parser.add_argument("--tls", type=Path)
    parser.add_argument("--trust-code", action="store_true")
    parser.add_argument("--allow", default="")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--ports", default="")
    arguments = parser.parse_args()
    paths = RunPaths.at(arguments.run)
    if arguments.join:
        contexts = load_tls_contexts(arguments.tls, where="--tls") if arguments.tls else None
        trust = CodeTrust.from_text(arguments.allow, everything=arguments.trust_code)
        if KEY_VARIABLE in os.environ:
            seat = Seat(number=arguments.seat)
            me = ApartIdentity.from_environment(seat, arguments.join, contexts)
            sys.exit(run_apart_worker(paths, me, ports=arguments.ports))
        joined = partial(run_remote_worker, paths, arguments.join, arguments.dir, ports=arguments.ports)
        sys.exit(joined(trust=trust, tls_contexts=contexts))
    who = f"worker-{arguments.seat}"
    sys.exit(
        run_reporting_errors(
            EventWriter(paths.events, who),
            lambda stream: run_local_worker(paths, arguments.seat, stream, trace=arguments.trace),
        )
    )


@dataclass
class WorkerSession:
    """This worker's identity towards its driver. The control client's thread calls `on_seat_changed` when the driver
    gives it another seat, `on_view` with each new view, `on_chunk_table` with each new chunk table, and `on_inspect`
    when the driver asks for stacks or a profile. Every driver that welcomes the worker gets its `chunk_boundaries`.
    `agent` is the secret of the agent that started it, and `key` the driver's proof of its seat, both for a worker
    without the run's directory. `nonce` tells this process from another one in its seat. `refusal`: why it must not
    train in this run; a worker that joined may learn that only when the run's engine has its first worker."""

    driver_address: Callable[[], DriverAddress | None]
    peers: PeerServices
    activity: Activity
    attachment: Attachment
    seat: int | None = None
    agent: str = ""
    key: str = ""
    nonce: str = field(default_factory=new_token)
    platform: dict[str, str] = field(default_factory=platform_facts)
    leaving: bool = False
    refusal: ShoalError | None = None
    on_seat_changed: Callable[[int], None] = lambda seat: None
    on_view: Callable[[View], None] = lambda view: None
    on_chunk_table: Callable[[ChunkTable], None] = lambda table: None
    on_inspect: Callable[[dict[str, Any]], None] = lambda fields: None
    chunk_boundaries: list[int] = field(default_factory=list)
    usage: UsageSampler | None = None

    def make_control_client(self, tls_contexts: TlsContexts | None) -> ControlClient:
        control = ControlClient(
            self.driver_address,
            lambda: self._hello(control),
            heartbeat=self._heartbeat,
            on_view=lambda view: self.on_view(view),  # noqa: PLW0108  # it is set later
            on_chunk_table=lambda table: self.on_chunk_table(table),  # noqa: PLW0108
            on_welcome=lambda fields: self._on_welcome(control, fields),
            on_inspect=lambda fields: self.on_inspect(fields),  # noqa: PLW0108
            tls_contexts=tls_contexts,
        )
        return control

    def _hello(self, control: ControlClient) -> dict[str, Any]:
        return {
            "role": "worker",
            "seat": self.seat,
            "key": self._seat_key(),
            "nonce": self.nonce,
            "agent": self.agent,
            "attachment": self.attachment.model_dump(),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "address": self.peers.endpoint.address.model_dump(),
            "view": control.view.number if control.view else 0,
            "training": self.activity.phase not in ("building", "waiting"),
            "table": control.chunk_table.model_dump(mode="json") if control.chunk_table else None,
            "platform": self.platform,
        }

    def _seat_key(self) -> str:
        """What proves that the driver gave this worker its seat: made from the run's secret, or from its welcome."""
        driver = self.driver_address()
        return (driver.key(f"worker-{self.seat}") if driver else "") or self.key

    def _heartbeat(self) -> dict[str, Any]:
        self.usage = self.usage or UsageSampler(lambda: self.activity.moved_bytes(), device_memory)  # noqa: PLW0108
        used = self.usage.sample()
        row = self.activity.heartbeat() | ({"leaving": True} if self.leaving else {}) | self.peers.stats()
        return row if used is None else row | {"usage": used}

    def _on_welcome(self, control: ControlClient, fields: dict[str, Any]) -> None:
        if self.chunk_boundaries:
            control.send("cuts", cuts=self.chunk_boundaries)
        seat = int(fields["seat"])
        if self.seat is not None and seat != self.seat:
            self.on_seat_changed(seat)
        self.seat, self.key = seat, str(fields.get("key", ""))
        self.refusal = self.refusal or other_bits_error(fields.get("platform"), self.platform)

    def require_no_refusal(self) -> None:
        if self.refusal is not None:
            raise self.refusal


def run_local_worker(paths: RunPaths, seat: int, stream: EventWriter, *, trace: bool = False) -> None:
    """Run a worker that can reach the run's directory."""
    driver_address = read_driver_address(paths.driver_address)
    assert driver_address is not None, "the driver writes it before it starts workers"
    latest = partial(read_driver_address, paths.driver_address)
    job = load_run_job(paths.job)
    contexts = tls_contexts_for(job)
    with (
        hold_seat_lock(paths, seat),
        open_session(
            driver_address, latest, STARTED_BY_ENGINE, seat=seat, tls_contexts=contexts, ports=job.network.ports
        ) as (session, control),
    ):
        connect_to_driver(control)
        train(job, DirectoryOutput(paths), session, control, stream, trace=trace)


def run_remote_worker(
    paths: RunPaths,
    driver: str,
    base_dir: str,
    *,
    trust: CodeTrust,
    tls_contexts: TlsContexts | None = None,
    ports: str = "",
) -> int:
    """Run a worker that joins from another machine. It also keeps its events in its own directory, for its user. It
    leaves at once if the job names code that is not trusted here."""
    driver_address = DriverAddress(*parse_address(driver), os.environ.pop(TOKEN_VARIABLE, ""))
    own_stream = EventWriter(paths.events, "worker")
    with open_session(
        driver_address, lambda: driver_address, JOINED, seat=None, tls_contexts=tls_contexts, ports=ports
    ) as (session, control):
        session.agent = os.environ.pop(AGENT_VARIABLE, "")
        try:
            welcome = control.connect(WELCOME_TIMEOUT_S)
        except ShoalError as failure:
            emit_failure(own_stream, failure)
            print(failure, file=sys.stderr)
            return failure.exit_code
        stream = EventWriter.to_callback(lambda row: emit_to_both(control, own_stream, row), f"worker-{session.seat}")
        job = Job.model_validate(welcome["job"]).model_copy(update={"base_dir": str(Path(base_dir).resolve())})
        save_job(job, paths.job)

        def work(stream: EventWriter) -> None:
            session.require_no_refusal()
            require_trust(job, trust)
            print(f"joined run {welcome['run']} as worker-{session.seat}", flush=True)
            train(job, DirectoryOutput(paths), session, control, stream)

        code = run_reporting_errors(stream, work)
        control.send("bye")  # without it the driver would count this worker as dead
        return code


def run_apart_worker(scratch: RunPaths, me: ApartIdentity, *, ports: str = "") -> int:
    """Run a worker of the run's engine that cannot open the run's directory. It ends with its agent."""
    address, number = me.driver, me.seat.number
    with open_session(
        address, lambda: address, STARTED_APART, seat=number, tls_contexts=me.tls_contexts, ports=ports
    ) as (session, control):
        session.key = me.key
        stream = EventWriter.to_callback(lambda row: control.send("event", row=row.decode()), me.seat.name)
        connections = DriverConnections(me.connect_for_files)

        def work(stream: EventWriter) -> None:
            connect_to_driver(control)
            welcome = control.connect(WELCOME_TIMEOUT_S)
            remote = RemoteRun.model_validate(welcome["remote"])
            job = fetch_job(connections, Job.model_validate(welcome["job"]), remote, cache_directory())
            output = DriverOutput(scratch, connections, remote.store_name, remote.namespace)
            train(job, output, session, control, stream, trace=remote.trace)

        with contextlib.closing(connections):
            return run_reporting_errors(stream, work)


def emit_to_both(control: ControlClient, own_stream: EventWriter, row: bytes) -> None:
    """Send an event to the driver and keep a copy. Steps are not kept: their number has no limit."""
    control.send("event", row=row.decode())
    event = parse_event(row)
    if event is not None and event.kind != "step":
        own_stream.append(event)


@contextlib.contextmanager
def open_session(
    initial_address: DriverAddress,
    driver_address: Callable[[], DriverAddress | None],
    attachment: Attachment,
    *,
    seat: int | None,
    tls_contexts: TlsContexts | None,
    ports: str | None = None,
) -> Iterator[tuple[WorkerSession, ControlClient]]:
    """Open the peer services and the control client of this process, and close both at the end."""
    bind = own_address(initial_address)
    peers = PeerServices(initial_address.token, bind=bind, ports=parse_ports(ports), tls_contexts=tls_contexts)
    session = WorkerSession(driver_address, peers, Activity(), attachment, seat)
    control = session.make_control_client(tls_contexts)
    try:
        yield session, control
    finally:
        control.close()
        peers.close()


def train(
    job: Job,
    output: RunOutput,
    session: WorkerSession,
    control: ControlClient,
    stream: EventWriter,
    *,
    trace: bool = False,
) -> None:
    """Build the job, then run the elastic loop to its end."""
    assert session.seat is not None
    leave_reason = install_leave_handler(session, control, job.elastic.patience_s)
    for message in apply_limits(job.limits, seat=session.seat, run=output.paths.name):
        stream.emit("note", message=message)
    prepare_torch(job)
    tell_missing_kernels(lambda why: stream.emit("self_checked", lanes=0, why=why))
    stream.emit(
        "worker_started",
        pid=os.getpid(),
        host=socket.gethostname(),
        threads=job.threads,
        torch=torch.__version__,
    )
    built = build(job, cache_dir=cache_directory(), report=stream.emit, choose_device=claim_device)
    ways_out = TrainingSession(
        control, session.peers, session.activity, partial(place_chunks, session, control), leave_reason
    )
    attachment = session.attachment
    loop, context = build_loop(
        built,
        output.paths,
        session=ways_out,
        stream=stream,
        has_state=attachment.can_save,
        trace=trace,
        output=output,
    )
    loop.evaluated = control.beat
    has_directory = attachment.can_save and not attachment.needs_job
    notes = partial(stream.emit, "note")
    profiler = StepProfiler(output.paths, who=lambda: stream.who, note=lambda text: notes(message=text))
    loop.at_boundary = profiler.at_boundary
    if not has_directory:
        inspected = InspectedWorker(control, output.paths)
        session.on_inspect, profiler.deliver = inspected.answer, inspected.send_trace
    save_lock = output.paths.saving_lock if has_directory else None
    elastic = ElasticLoop(loop, peers=session.peers, seat=session.seat, save_lock=save_lock)
    session.on_view, session.on_seat_changed = elastic.on_view, elastic.on_seat_changed
    try:
        elastic.run()
    finally:
        context.batches.close()
        context.store.close()


def place_chunks(
    session: WorkerSession,
    control: ControlClient,
    chunk_offsets: list[int],
    on_chunk_table: Callable[[ChunkTable], None],
) -> None:
    """Tell the driver where parameters may be cut. Every chunk table from the driver goes to `on_chunk_table`."""
    session.on_chunk_table = on_chunk_table
    if control.chunk_table is not None:
        on_chunk_table(control.chunk_table)
    session.chunk_boundaries = chunk_offsets
    control.send("cuts", cuts=chunk_offsets)


def install_leave_handler(session: WorkerSession, control: ControlClient, patience_s: float) -> Callable[[], str]:
    """Returns a function that says why this worker must leave by itself, or ''. On SIGTERM, as spot machines send it,
    the heartbeat tells the driver, which lets the worker leave once other workers hold its state. Without a driver it
    leaves at once. The function raises the driver's refusal."""

    def terminated(*_: object) -> None:
        session.leaving = True

    signal.signal(signal.SIGTERM, terminated)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def why() -> str:
        session.require_no_refusal()
        if session.leaving and control.driver_silence_s > 0:
            return "terminated"
        return f"no driver came back in {patience_s:g} s" if control.driver_silence_s > patience_s else ""

    return why


if __name__ == "__main__":
    main()
