"""Drives one run: starts its workers and servers, follows its events, reacts to exits, writes the receipt."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from shoal.checkpoint.model_check import VerifiedModel, verify_model
from shoal.errors import ShoalError, error, error_from_fields
from shoal.events import Event, EventWriter, LineTail, RunState, RunStateReader, describe_damage
from shoal.fleet.agents.agent_reports import AgentReports
from shoal.fleet.control_server import ControlMessage, ControlServer
from shoal.fleet.driver_address import DriverAddress, read_driver_address, write_driver_address
from shoal.fleet.engine import Exit
from shoal.fleet.engines.host_use import HostUse
from shoal.fleet.engines.make import make_job_engine
from shoal.fleet.forkserver import ForkServer
from shoal.fleet.messages import AgentHello, UserHello, parse_hello, parse_user_request
from shoal.fleet.orphans import locked_seats
from shoal.fleet.process_main import TOKEN_VARIABLE
from shoal.fleet.rate_limit import RateLimit
from shoal.fleet.roster import SeatNumbers
from shoal.jobs.alerts.watch import RunWatch
from shoal.jobs.command_handler import CommandHandler
from shoal.jobs.coroutines import BackgroundCall
from shoal.jobs.plan_file import read_plan_file
from shoal.jobs.receipt import make_receipt
from shoal.jobs.remote.seat_launches import DirectoryLaunches, RemoteLaunches, SeatLaunches
from shoal.jobs.replanner import Replanner
from shoal.jobs.run_health import ensure_descriptors, find_damage, server_loss, worker_death, write_receipt
from shoal.jobs.run_result import PAUSED, RunResult
from shoal.jobs.server_group import ServerGroup
from shoal.jobs.worker_group import WorkerGroup, initial_workers
from shoal.net.errors import ProtocolError
from shoal.net.handshake import new_token
from shoal.plan.membership_policy import decide_restart
from shoal.spec.certificates import tls_contexts_for
from shoal.spec.job import Job
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Seat

SHUTDOWN_TIMEOUT_S = 10.0
"""Seconds that workers have to exit after the run has finished."""
MIN_TOKEN_CHARACTERS = 16
MAX_USERS = 64
"""Connections of users. The oldest is closed for one more."""
REFUSALS_PER_S, REFUSALS_AT_ONCE = 1, 20
"""How many `refused` events are written in the long run and at once."""
OnRunEvent = Callable[[Event, RunState], str | None]
"""Called with every event. A returned reason (such as "pruned") stops the run at the next step boundary."""


class RunDriver:
    """One run. After `start`, call `tick` until it returns a result: whenever one of `filenos` is readable, and
    periodically. `stop` lets the workers save and exit. Only `wait` and `close` block."""

    def __init__(
        self,
        job: Job,
        paths: RunPaths,
        fork_server: ForkServer,
        *,
        on_event: OnRunEvent | None = None,
        trace: bool = False,
        until: int | None = None,
        host_use: HostUse | None = None,
    ) -> None:
        self.job = job
        self.paths = paths
        self._until = until
        self.engine = make_job_engine(job, paths, fork_server, host_use=host_use)
        self._on_event = on_event
        self._trace = trace
        self._exit = contextlib.ExitStack()  # cleanup for `close`, in reverse order
        self._stream = self._exit.enter_context(contextlib.closing(EventWriter(paths.events, "driver")))
        self._reader = RunStateReader(paths.events, paths.state_snapshot)
        self.state = self._reader.state
        self._output_tails: dict[int, tuple[str, LineTail]] = {}
        self._replanner: Replanner | None = None
        self._watch = RunWatch(job, paths, self._stream)
        self._exit.callback(self._watch.close)
        self._users: dict[int, UserHello] = {}  # by connection, the oldest first
        self._refusal_limit = RateLimit(REFUSALS_PER_S, REFUSALS_AT_ONCE)
        self._last_step_known = False
        self._restarts_left = job.elastic.restarts
        self._expected_exits: set[int] = set()  # seats whose exits have already been charged to a restart
        self.stop_reason = ""
        self._shutdown_deadline_s = self._verification_began_s = 0.0
        self._verification: BackgroundCall[VerifiedModel] | None = None
        self._ending: BackgroundCall[None] | None = None
        self._result: RunResult | None = None

    # ---- for the caller ----

    def start(self) -> None:
        """Start the run, or take it over from an earlier driver."""
        servers = self.job.sync.servers if self.job.sync.kind == "server" else 0
        ensure_descriptors(initial_workers(self.job, self.engine.capacity()) + servers)
        self._reader.catch_up()  # events that an earlier driver has shown are not shown again
        if damage := describe_damage(self.state.skipped_rows):
            self._stream.emit("note", message=damage)
        # the workers finished it without a driver
        already_finished = bool(self.state.result) and self.state.status != "failed"
        locked = locked_seats(self.paths)
        reattached = self.engine.reattach()
        self._report_unseen_deaths([seat for seat in locked if seat not in reattached])
        taken = [seat.name for seat in reattached]
        free = first_free_seat([*self.state.workers, *self.state.servers, *taken])
        seat_numbers = SeatNumbers(max(free, self.state.seats_given))
        self.control = self._exit.enter_context(contextlib.closing(open_control(self.job, self.paths)))
        launches = self._exit.enter_context(contextlib.closing(self._make_launches()))
        self._exit.callback(lambda: self.engine.close())  # noqa: PLW0108  # a test may replace the engine
        self.server_group = self._make_server_group(seat_numbers, launches)
        self.worker_group = WorkerGroup(
            self.job,
            self.paths,
            self.engine,
            self.control,
            self._stream,
            seat_numbers=seat_numbers,
            server_group=self.server_group,
            launches=launches,
        )
        self.worker_group.membership.pause_at = self._until
        self.commands = CommandHandler(
            self.worker_group.membership, self.server_group, inspect=self.worker_group.inspect
        )
        if not already_finished:
            tls = self.job.network.tls is not None
            self._stream.emit(
                "run_started", run=self.paths.name, pid=os.getpid(), listens=self.control.address, tls=tls
            )
        self._start_replanner()
        group = self.worker_group
        self._agent_reports = AgentReports(self.control, self.paths, self._stream, agent_of=group.agent_of)
        workers = [seat.number for seat in reattached if seat.role == "worker"]
        self._last_step_known = bool(workers)
        group.start(workers, view_number=self.state.view_number, saved_step=self.state.saved_step or 0)
        if self.server_group:
            self.server_group.start(seat.number for seat in reattached if seat.role == "server")

    def _report_unseen_deaths(self, ended: Iterable[Seat]) -> None:
        """Report processes that were killed while the run had no driver. Others of them were reported before."""
        for seat in ended:
            known = self.state.workers.get(seat.name) or self.state.servers.get(seat.name)
            if known is None or known.state not in ("dead", "left", "failed", "finished"):
                died: dict[str, Any] = {seat.role: seat.name, "reason": "it ended while the run had no driver"}
                self._stream.emit(f"{seat.role}_died", **died)

    def _make_launches(self) -> SeatLaunches:
        if self.job.engine.shares_run_dir:
            return DirectoryLaunches(self.paths, trace=self._trace)
        return RemoteLaunches(self.job, self.paths, self.control, token=self.control.token, trace=self._trace)

    def _make_server_group(self, seat_numbers: SeatNumbers, launches: SeatLaunches) -> ServerGroup | None:
        sync = self.job.sync
        if sync.kind != "server":
            return None
        return ServerGroup(
            sync,
            self.paths,
            self.engine,
            self.control,
            self._stream,
            seat_numbers=seat_numbers,
            restarts=self.job.elastic.restarts,
            launches=launches,
        )

    def _start_replanner(self) -> None:
        """Make a replanner if the run was planned and its model is not sharded."""
        plan_file = read_plan_file(self.paths)
        if plan_file is None or self.job.workers_per_replica > 1:
            return
        if not self.state.plan:
            self._stream.emit("plan", **plan_file.told)
        membership = self.worker_group.membership
        self._replanner = Replanner(self.job, plan_file, membership, self.commands, self._stream, self.state)

    def stop(self, why: str) -> None:
        """Stop at a step boundary: one worker saves, all exit, and `why` becomes the run's status."""
        if not self.stop_reason:
            self.stop_reason = why
            self.worker_group.stop(why)

    @property
    def stop_requested(self) -> str:
        """The reason of a user's `stop` command; '' if there was none."""
        return self.commands.stop_requested

    def filenos(self) -> list[int]:
        """For select(): `tick` has something to do when one of these is readable."""
        if self._ending:
            return [self._ending.fileno()]
        verification = [self._verification.fileno()] if self._verification and not self._verification.done else []
        return [self.engine.fileno(), self.control.fileno(), *verification]

    def wait(self, timeout_s: float) -> None:
        """Wait until `tick` has something to do or the timeout expires."""
        wait(self.filenos(), timeout_s)

    def tick(self) -> RunResult | None:
        """Handle new messages, events and exits, then decide and act. Returns the result once the run has ended and all
        its processes and connections are closed."""
        if self._ending is None:
            result = self._advance()
            if result is not None:
                self._result = self._write_end(result)
                self._ending = BackgroundCall(self._exit.close)  # may take a second if peers do not read
        if self._ending is None or not self._ending.done:
            return None
        self._ending.result()
        return self._result

    def close(self) -> None:
        """Stop every process that this run started, also if the run has not ended."""
        if self._ending is not None:
            self._ending.result()
        self._exit.close()

    # ---- one tick ----

    def _advance(self) -> RunResult | None:
        """Returns a result if the run ends now."""
        exits = self.engine.poll(0)
        self._receive()
        self._read_events()
        results = [self._handle_exit(one) for one in exits]  # all of them: each death is reported
        if ended := next(filter(None, results), None):
            return ended
        if self.state.result:
            return self._shut_down()
        if not self.paths.events.exists() and (gone := find_damage(self.paths)):
            return self._failed(gone)
        if self.worker_group.membership.pause_reached:
            self.stop(PAUSED)
        if not self.job.engine.shares_run_dir and not self.engine.capacity():
            self.stop("terminated")  # every machine is being taken away: save while there is time
        self.worker_group.tick()
        if self.stop_reason and not self.worker_group.seats:
            return RunResult(self.paths, self.stop_reason)
        if self.server_group and (
            lost := self.server_group.tick(time.monotonic(), self.worker_group.roster.connections)
        ):
            return self._restart_from_checkpoint(lost.why)
        if self._replanner:
            self._replanner.replan_if_needed(self.state.step)
        return None

    def _shut_down(self) -> RunResult | None:
        """Let all processes exit after the run has finished, and read its model meanwhile. Returns the result when both
        are done."""
        now = time.monotonic()
        self._shutdown_deadline_s = self._shutdown_deadline_s or now + SHUTDOWN_TIMEOUT_S
        if self._verification is None:
            verify = partial(verify_model, self.paths.model, weights_sha256=self.state.result["weights_sha256"])
            self._verification, self._verification_began_s = BackgroundCall(verify), now
        if self.worker_group.seats and now < self._shutdown_deadline_s:
            self.worker_group.dismiss("finished")
            return None
        if not self._verification.done:
            return None
        if self.server_group:
            self.server_group.flush_stats()
        return self._finished(self._verification)

    def _finished(self, verification: BackgroundCall[VerifiedModel]) -> RunResult:
        try:
            verified = verification.result()
        except ShoalError as failure:
            return self._failed(failure)
        self._stream.emit(
            "verified",
            weights_sha256=verified.weights_sha256,
            size_bytes=verified.size_bytes,
            verify_s=round(time.monotonic() - self._verification_began_s, 6),
        )
        self._read_events()
        return RunResult(self.paths, "finished", receipt=make_receipt(self.job, self.state, run=self.paths.name))

    def _write_end(self, result: RunResult) -> RunResult:
        if result.receipt:
            try:
                write_receipt(self.paths, result.receipt)
            except ShoalError as failure:
                result = self._failed(failure)
        self.worker_group.dismiss(f"the run is {result.status}")  # else remote workers wait for another driver
        self._watch.end(result.status, str(result.error.message) if result.error else "")
        self._stream.emit("run_ended", status=result.status, refused=self.control.refused + self.worker_group.refused)
        self._read_events()
        self._reader.save()
        return replace(result, saved_step=self.state.saved_step)

    # ---- messages of workers, servers and users ----

    def _receive(self) -> None:
        for message in self.control.receive():
            if message.kind == "here":
                self._handle_hello(message)
            elif self.server_group and self.server_group.owns_connection(message.connection):
                self.server_group.handle(message)
            elif message.connection in self._users:
                self._handle_command(message)
            elif self._agent_reports.owns_connection(message.connection):
                self._agent_reports.handle(message)
            else:
                self.worker_group.handle(message)
        for refusal in self.control.take_refusals():
            if self._refusal_limit.allows(1, time.monotonic()):
                self._stream.emit("refused", name=refusal.name, address=refusal.address, reason=refusal.reason)

    def _handle_hello(self, message: ControlMessage) -> None:
        role = message.fields.get("role")
        if role == "server" and self.server_group:
            self.server_group.handle_hello(message)
        elif role == "worker":
            self.worker_group.handle_hello(message)
        else:
            try:
                self._admit(message)
            except ProtocolError as failure:
                self.control.refuse(message.connection, str(failure))

    def _admit(self, message: ControlMessage) -> None:
        """Welcome an agent or a user. ProtocolError if it must be refused."""
        hello = parse_hello(message.fields)
        if isinstance(hello, AgentHello):
            self._agent_reports.admit(message.connection, hello)
        elif isinstance(hello, UserHello):
            if len(self._users) >= MAX_USERS:
                oldest = next(iter(self._users))
                self.control.drop(oldest)
                del self._users[oldest]
            self._users[message.connection] = hello
            ports = self.job.network.ports or ""
            self.control.send(message.connection, "welcome", run=self.paths.name, threads=self.job.threads, ports=ports)
        else:
            raise ProtocolError("the run has no servers")

    def _handle_command(self, message: ControlMessage) -> None:
        """Carry out a user's command and reply with the run's status. A malformed command closes the connection, and so
        does one of a process that cannot read the run's directory."""
        if message.kind == "lost":
            del self._users[message.connection]
            return
        try:
            request = parse_user_request(message.kind, message.fields)
            if not self.control.holds_key("user", self._users[message.connection].key):
                raise ProtocolError("commands need the run's directory, and it has the token alone")
            self.commands.handle(request)
        except ProtocolError as failure:
            self.control.refuse(message.connection, str(failure), name="a user")
            del self._users[message.connection]
            return
        self.control.send(message.connection, "answer", **self.commands.status())

    def _read_events(self) -> None:
        for number in self.engine.running():
            if number not in self._output_tails:
                seat = Seat(number=number, role="worker" if number in self.worker_group.seats else "server")
                self._output_tails[number] = seat.name, LineTail(self.paths.log(number, seat.role))
        for name, lines in self._output_tails.values():
            for line in lines.read_new():
                self._notify(Event("printed", time.time(), name, fields={"text": line}))
        for event in self._reader.read_new():
            if self._replanner:
                self._replanner.observe(event, self.state)
            self._watch.observe(event)
            self._notify(event)
        self._watch.tick(self.state)
        self._reader.save_if_due()
        self._last_step_known = self._last_step_known or bool(self.state.built_by)
        if self._last_step_known and self.state.steps_total:
            self.worker_group.set_last_step(self.state.steps_total)

    def _notify(self, event: Event) -> None:
        if self._on_event and (why := self._on_event(event, self.state)):
            self.stop(why)

    # ---- exits ----

    def _handle_exit(self, one: Exit) -> RunResult | None:
        """Returns a result if the run cannot continue."""
        self._output_tails.pop(one.seat, None)
        was_ready = self.worker_group.was_ready(one.seat)
        is_server = self.server_group is not None and one.seat in self.server_group.seats
        group = self.server_group if self.server_group and is_server else self.worker_group
        why = group.handle_exit(one)
        if self.state.result:
            return None
        if self.state.error:
            return self._failed(self._reported_error())
        if is_server:
            return self._failed(server_loss(self.paths, one, why)) if why else None
        return self._after_worker_exit(one, died=bool(why), was_ready=was_ready)

    def _after_worker_exit(self, one: Exit, *, died: bool, was_ready: bool) -> RunResult | None:
        if self.stop_reason:
            return None if self.worker_group.seats else RunResult(self.paths, self.stop_reason)
        if one.seat in self._expected_exits:
            return None
        if not died:
            all_left = not self.worker_group.membership.members and not self.worker_group.seats
            return RunResult(self.paths, "stopped") if all_left else None
        if was_ready and self.worker_group.has_live_state:
            return None  # the other workers continue, and a new one is started
        if damage := one.start_error or find_damage(self.paths):
            return self._failed(damage)  # another worker would fail likewise
        why = self._use_restart(ready=was_ready)
        return self._failed(worker_death(self.paths, one, why)) if why else None

    def _restart_from_checkpoint(self, lost: str) -> RunResult | None:
        """The servers lost parameters: evict all workers, which then start from the newest checkpoint. Returns a result
        if no restart is left."""
        why = self._use_restart(ready=True)
        if why and not self.stop_reason:
            return self._failed(error("SH618", f"{lost}; {why}", where=str(self.paths.logs)))
        self._expected_exits |= self.worker_group.evict_all(lost)
        return None

    def _use_restart(self, *, ready: bool) -> str:
        """Use one of the job's restarts. Returns '', or why there is none."""
        choice = decide_restart(restarts_left=self._restarts_left, ready=ready)
        if choice.action == "give up":
            return choice.why
        self._restarts_left -= 1
        return ""

    def _failed(self, failure: ShoalError) -> RunResult:
        row = self.state.error or {}
        traceback = row["where"] if row.get("code") == "BUG" else ""
        return RunResult(self.paths, "failed", error=failure, traceback=traceback)

    def _reported_error(self) -> ShoalError:
        row = self.state.error or {}
        if row["code"] == "BUG":
            return ShoalError(
                "SH603", row["message"], where=str(self.paths.logs), fix="This is a bug in Shoal: please report it."
            )
        return error_from_fields(row)


def open_control(job: Job, paths: RunPaths) -> ControlServer:
    """Open the control server with an earlier driver's token and, if it is free, port. Its address is written to the
    run directory for the workers. A token in the environment comes first: a launcher may give it to all machines."""
    known = read_driver_address(paths.driver_address)
    token, port, secret = (known.token, known.port, known.secret) if known else (new_token(), 0, "")
    token = given_token() or token
    contexts = tls_contexts_for(job)
    port = job.network.port or port
    control = ControlServer(token, listen=job.network.listen, port=port, tls_contexts=contexts, secret=secret)
    if job.network.port and control.port != port:
        control.close()
        raise error("SH611", f"port {port} is in use", where="network.port", fix="Choose another port, or none.")
    write_driver_address(paths.driver_address, DriverAddress(control.host, control.port, token, control.secret))
    return control


def given_token() -> str:
    """The token of the environment; '' if there is none. SH615 if it could be guessed."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if token and len(token) < MIN_TOKEN_CHARACTERS:
        message = f"the token has {len(token)} characters"
        fix = f"Give at least {MIN_TOKEN_CHARACTERS} random ones, such as `openssl rand -hex 16` prints."
        raise error("SH615", message, where=TOKEN_VARIABLE, fix=fix)
    return token


def first_free_seat(names: Iterable[str]) -> int:
    """The first seat number that no worker or server has ever had. A number that no driver gives out, in a damaged
    event, is none."""
    seats = (re.fullmatch(r"(?:worker|server)-(\d{1,8})", name) for name in names)
    return max((int(seat[1]) for seat in seats if seat), default=-1) + 1
