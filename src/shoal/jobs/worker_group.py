"""The workers of one run: their messages and exits go to the membership policy, and its actions are carried out."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

from shoal.events import EventWriter
from shoal.fleet.control_server import ControlMessage, ControlServer
from shoal.fleet.engine import Engine, Exit, Node
from shoal.fleet.event_relay import EventRelay
from shoal.fleet.messages import (
    BeatMessage,
    ByeMessage,
    CutsMessage,
    EventMessage,
    FoundMessage,
    InspectRequest,
    StandingMessage,
    UsageFields,
    WorkerHello,
    WorkerMessage,
    parse_hello,
    parse_worker_message,
    printable,
)
from shoal.fleet.platform_facts import describe_difference
from shoal.fleet.remote_inspection import InspectionDesk
from shoal.fleet.roster import RECONNECT_TIMEOUT_S, START_TIMEOUT_S, Peer, Roster, SeatNumbers
from shoal.fleet.usage import oom_kills
from shoal.jobs.liveness import LivenessCheck
from shoal.jobs.remote.seat_launches import DirectoryLaunches, SeatLaunches
from shoal.jobs.server_group import ServerGroup
from shoal.net.errors import ProtocolError
from shoal.net.host_id import host_id
from shoal.plan.members import EvictWorker, MembershipAction, PublishView, StartWorkers
from shoal.plan.sharded_membership import make_membership_policy
from shoal.spec.job import MAX_WORKERS, Job
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Seat, View, position_of

EXIT_TIMEOUT_S = 10.0
"""Seconds that a worker has to exit after its connection was closed, if it was told to leave."""
MAX_UNSEEN_VIEWS = 1000
"""How far a worker that connects may be ahead of the newest view that this driver knows: an earlier driver may have
published views that are in no event."""


class WorkerGroup:
    """A roster of workers and the membership policy. Belongs to the driver's thread.

    Call `tick` whenever something is readable, and periodically. `server_group` is None for a run without servers; it
    supplies the chunk table that is sent to workers. Without `launches`, workers open the run's directory.
    """

    def __init__(
        self,
        job: Job,
        paths: RunPaths,
        engine: Engine,
        control: ControlServer,
        stream: EventWriter,
        *,
        seat_numbers: SeatNumbers,
        server_group: ServerGroup | None,
        launches: SeatLaunches | None = None,
    ) -> None:
        self.membership = make_membership_policy(job, wanted_workers=initial_workers(job, engine.capacity()))
        self.roster = Roster(control)
        self._job = job
        self._paths = paths
        self._engine = engine
        self._control = control
        self._stream = stream
        self._seat_numbers = seat_numbers
        self._server_group = server_group
        self._launches = launches or DirectoryLaunches(paths)
        self._liveness = LivenessCheck(self.roster)
        self._latest_views: dict[int, View] = {}
        self._final_view: View | None = None  # also sent to workers that connect after the end
        self._refused_by_seat: dict[int, int] = {}  # connections that the workers' own listeners refused, by seat
        self._relays: dict[int, EventRelay] = {}  # for workers that joined
        self._platform: dict[str, str] = {}  # of the first worker of the engine
        self._agents: dict[int, str] = {}  # by seat: the secret of the agent that started the worker, or ''
        self._last_step: int | None = None
        self._inspections = InspectionDesk(
            paths, lambda seat, fields: control.send(self.roster[seat].connection, "inspect", **fields)
        )
        self._usage_at_s: dict[int, float] = {}
        self._oom_kills = oom_kills()
        self._withdrawn: set[int] = set()  # seats that had no machine yet when the run ended

    def start(self, reattached: Sequence[int], *, view_number: int = 0, saved_step: int = 0) -> None:
        """Expect the workers that outlived an earlier driver, whose newest known view was `view_number`. `tick` starts
        the missing ones."""
        self.membership.view_number = max(self.membership.view_number, view_number)
        self.membership.saved_step = 0 if reattached else saved_step
        for seat in reattached:
            self.membership.expect(seat, returns=True)
            self.roster.expect_back(seat, until_s=time.monotonic() + RECONNECT_TIMEOUT_S)

    def tick(self) -> list[MembershipAction]:
        """Evict failed workers, then carry out the policy's actions and return them."""
        now = time.monotonic()
        self._watch_waiting(now)
        if self._liveness.is_due(now):
            self._check_liveness(now)
        actions = self.membership.decide(now)
        for action in actions:
            if isinstance(action, StartWorkers):
                self._start_workers(action.count)
            elif isinstance(action, EvictWorker):
                self.evict(action.seat, action.why)
            else:
                self._publish(action)
        return actions

    def handle_exit(self, one: Exit) -> str:
        """Handle the exit of a worker of the engine. Returns why it died, or '' if it exited cleanly."""
        if one.seat in self._withdrawn:
            self._remove_worker(one.seat, left_cleanly=True)
            return ""
        if one.code is None:  # it may live on somewhere, and must not be heard any more
            self.roster.disconnect(one.seat)
        self._remove_worker(one.seat, left_cleanly=one.code == 0)
        why = self.roster.readmit(one.seat)
        if one.code == 0:
            return ""
        why = why or one.reason + self._name_oom_kill(one)
        self._stream.emit("worker_died", worker=f"worker-{one.seat}", reason=why)
        return why

    def _name_oom_kill(self, one: Exit) -> str:
        """What the kernel of this machine says of a process that was killed; '' if it did not run out of memory."""
        before, self._oom_kills = self._oom_kills, oom_kills()
        is_killed = one.reason == "SIGKILL" and self._oom_kills > before
        return " (the kernel's out-of-memory killer was at work)" if is_killed else ""

    def stop(self, why: str) -> None:
        """Stop at a step boundary: one worker saves, then all exit."""
        if not self.membership.stop_reason:
            self.membership.stop(why)

    def dismiss(self, why: str) -> None:
        """Let all workers exit immediately, without saving."""
        if self._final_view is None:
            self._publish(self.membership.dismiss(why))
        self._withdraw_waiting()

    def evict(self, seat: int, why: str) -> None:
        """Remove the worker from the run, and kill it if the engine runs it."""
        self._stream.emit("evicted", worker=f"worker-{seat}", host=self.roster.host(seat), reason=why)
        self._launches.dismiss(seat)
        if seat in self._engine.running():
            self.roster.evict(seat, why)
            self._engine.stop([seat])
        else:
            self._drop_remote_worker(seat)

    def evict_all(self, why: str) -> set[int]:
        """Evict every worker that may hold state, including workers that outlived a driver and have not reconnected
        yet. Returns their seats."""
        seats = {*self.membership.members, *self.roster.take_overdue(math.inf)}
        for seat in sorted(seats):
            self.evict(seat, why)
        return seats

    def was_ready(self, seat: int) -> bool:
        """Whether this worker had got as far as being able to train."""
        member = self.membership.members.get(seat)
        return member is not None and (member.stopped or member.training)

    @property
    def seats(self) -> list[int]:
        """Seats of workers that the engine runs."""
        servers = self._server_group.seats if self._server_group else set()
        return [number for number in self._engine.running() if number not in servers]

    @property
    def refused(self) -> int:
        """Connections that the workers' own listeners refused: unknown clients, and peers of an older view."""
        return sum(self._refused_by_seat.values())

    @property
    def has_live_state(self) -> bool:
        """Whether a worker holds state from which the run can continue without a checkpoint."""
        return any(m.position or m.training for m in self.membership.members.values())

    def set_last_step(self, step: int) -> None:
        """The last step of the job, as a worker with the run's directory reported it."""
        self._last_step = step
        self.membership.final_position = position_of(step, evaluated=True)

    def agent_of(self, seat: int) -> str | None:
        """The secret of the agent that started the worker of this seat; '' if no agent did, None if it is unknown."""
        return "" if seat in self._engine.running() else self._agents.get(seat)

    # ---- messages of workers ----

    def handle_hello(self, message: ControlMessage) -> None:
        """A worker connects. It is refused if its hello is malformed, if it claims what it cannot have, or if its state
        is lost by servers."""
        try:
            hello = parse_hello({**message.fields, "role": "worker"})
            assert isinstance(hello, WorkerHello)
            seat = self._admit(hello)
        except ProtocolError as failure:
            self._control.refuse(message.connection, str(failure), name="a worker")
            return
        attachment, address = hello.attachment, hello.address
        peer = Peer(
            message.connection,
            hello.pid,
            printable(hello.host),
            managed=attachment.managed,
            same_host=address.host_id == host_id(),
            sends_events=attachment.needs_job,
            nonce=hello.nonce,
            platform=hello.platform,
        )
        self.roster.connect(seat, peer)
        if attachment.managed:
            self._launches.admit(seat)
            self._learn_platform(hello.platform)
        else:
            self._agents[seat] = hello.agent
        if not self._computes_other_bits(seat):
            training = hello.training and seat not in self.membership.members
            self.membership.arrived(seat, attachment, address=address, view=hello.view, training=training)
        self._welcome(message.connection, seat, hello)
        if self._server_group:
            if attachment.managed:
                self._server_group.observe_chunk_table(hello.table)
            self._server_group.send_chunk_table(message.connection)

    def _admit(self, hello: WorkerHello) -> int:
        """The seat of the worker. ProtocolError if it must be refused."""
        attachment = hello.attachment
        if hello.view > self.membership.view_number + MAX_UNSEEN_VIEWS:
            raise ProtocolError(f"it claims view {hello.view}, and the newest is {self.membership.view_number}")
        if hello.view and self._server_group is not None and self._server_group.is_lost(hello.table):
            raise ProtocolError("the servers lost the state that it holds")
        proved = hello.seat is not None and self._control.holds_key(f"worker-{hello.seat}", hello.key)
        if attachment.managed:
            seat = hello.seat if proved else None
            if seat is None or seat not in self.seats or self.roster.is_other_process(seat, hello.pid, hello.nonce):
                raise ProtocolError(f"seat {hello.seat} is not its seat")
            return seat
        if attachment.can_save:
            raise ProtocolError("it joined, so it cannot save")
        joined = sum(not self.roster[seat].managed for seat in self.roster)
        if joined >= MAX_WORKERS:
            raise ProtocolError(f"{joined} workers have joined already")
        if hello.seat is not None and proved and self._may_return(hello.seat):
            self._seat_numbers.reserve(hello.seat)
            return hello.seat
        return self._take_seats(1)[0]

    def _learn_platform(self, platform: dict[str, str]) -> None:
        """The first worker of the engine says what the run computes with. Those that joined before it and differ are
        told, and get no view. They had none: a view needs a worker that can save."""
        if self._platform or not platform:
            return
        self._platform = platform
        for seat in filter(self._computes_other_bits, self.roster):
            self.membership.gone(seat)
            self._send_welcome(seat)

    def _computes_other_bits(self, seat: int) -> bool:
        """Whether a worker that joined differs from the engine's. It is told, and leaves by itself."""
        peer = self.roster[seat]
        differs = self._platform and peer.platform and describe_difference(self._platform, peer.platform)
        return not peer.managed and bool(differs)

    def _may_return(self, seat: int) -> bool:
        """Whether a worker that joined may have its seat back: it was not evicted from it."""
        return seat not in self._engine.running() and not self.roster.is_evicted(seat)

    def _send_welcome(self, seat: int) -> None:
        peer, key = self.roster[seat], self._control.key(f"worker-{seat}")
        told = {"job": self._job.dump(), "key": key, "platform": self._platform} if peer.sends_events else {}
        remote = self._launches.welcome() if peer.managed else {}
        self._control.send(peer.connection, "welcome", seat=seat, run=self._paths.name, **told, **remote)

    def _welcome(self, connection: int, seat: int, hello: WorkerHello) -> None:
        self._send_welcome(seat)
        if self._final_view and self._final_view.number <= hello.view:  # the worker ignores a number below its newest
            self._final_view = self._final_view.model_copy(update={"number": hello.view + 1})
        if newest := self._final_view or self._latest_views.get(seat):
            self._control.publish_view(newest, [connection])

    def handle(self, message: ControlMessage) -> None:
        """Handle a worker's message. A message that is malformed or not to be believed closes the connection of this
        worker only."""
        seat = self.roster.seat_of(message.connection)
        if seat is None:
            return
        if message.kind == "lost":
            self._handle_lost(seat)
            return
        try:
            self._handle(seat, parse_worker_message(message.kind, message.fields))
        except ProtocolError as failure:
            self._control.refuse(message.connection, str(failure), name=f"worker-{seat} on {self.roster.host(seat)}")
            self._handle_lost(seat)

    def _handle(self, seat: int, message: WorkerMessage) -> None:
        match message:
            case BeatMessage():
                self._handle_heartbeat(seat, message)
            case StandingMessage():
                self._handle_standing(seat, message)
            case CutsMessage() if self._server_group and self.roster[seat].managed:
                self._server_group.set_chunk_boundaries(message.cuts)
            case EventMessage():
                self._relay(seat, message.row)
            case FoundMessage():
                self._inspections.take(seat, message)
            case ByeMessage():
                self.roster[seat].said_bye = True

    def inspect(self, request: InspectRequest) -> None:
        """Ask the workers that cannot open the run's directory for their stacks or a profile."""
        self._inspections.ask(request, [seat for seat in self.roster if self.roster[seat].sends_events])

    def _handle_lost(self, seat: int) -> None:
        """A connection is lost. A managed worker reconnects or the engine reports its exit. A remote one is removed."""
        self.roster.disconnect(seat)
        peer = self.roster[seat]
        if peer.managed:
            return
        if not peer.said_bye:
            self._stream.emit("worker_died", worker=f"worker-{seat}", reason="its connection was lost")
        self._drop_remote_worker(seat)

    def _handle_heartbeat(self, seat: int, beat: BeatMessage) -> None:
        if self._last_step is not None and beat.step > self._last_step:
            raise ProtocolError(f"it reports step {beat.step}, beyond the end of the job")
        self.roster[seat].last_heartbeat = beat
        self._refused_by_seat[seat] = max(self._refused_by_seat.get(seat, 0), beat.refused)
        if beat.lane_s:
            self.membership.record_lane_time(seat, beat.lane_s)
        if beat.lanes_timed:
            now_s = time.monotonic()
            self.membership.observe_lanes(seat, now_s, count=beat.lanes_timed, total_s=beat.lanes_timed_s)
        if beat.usage is not None:
            self._report_usage(seat, beat.usage)
        if beat.leaving:
            self.membership.drain(seat, "terminated", replace=True)

    def _report_usage(self, seat: int, usage: UsageFields) -> None:
        """At most one event per second for each worker, however often it tells."""
        now = time.monotonic()
        if now - self._usage_at_s.get(seat, -math.inf) >= 1.0:
            self._usage_at_s[seat] = now
            self._stream.emit("usage", worker=f"worker-{seat}", **usage.model_dump(exclude_none=True))

    def _handle_standing(self, seat: int, standing: StandingMessage) -> None:
        if why := self.membership.stopped_at(
            seat, time.monotonic(), view=standing.view, position=standing.position, checkpointed=standing.saved
        ):
            raise ProtocolError(why)

    def _relay(self, seat: int, row: str) -> None:
        """Write the event of a worker that cannot reach the run directory."""
        peer = self.roster[seat]
        if not peer.sends_events:
            raise ProtocolError("it can reach the run directory, and sends its events")
        if seat not in self._relays:
            lanes, batch_size = self._job.lane_count, self._job.batch_size
            self._relays[seat] = EventRelay(f"worker-{seat}", lanes, batch_size, managed=peer.managed)
        event = self._relays[seat].relay(row, host=self.roster.host(seat), last_step=self._last_step)
        if event is not None:
            self._stream.append(event)

    # ---- actions ----

    def _start_workers(self, count: int) -> None:
        seats = self._take_seats(count)
        for seat in seats:
            self.membership.expect(seat)
            self.roster.expect_start(seat, until_s=time.monotonic() + START_TIMEOUT_S)
        self._engine.start([self._launches.launch(Seat(number=seat)) for seat in seats])

    def _watch_waiting(self, now_s: float) -> None:
        """Seats without a machine: their time to connect has not begun, and a run that ends does not wait for them."""
        if self.membership.stop_reason:
            self._withdraw_waiting()
        waiting = self._engine.waiting()
        for seat in waiting:
            self.roster.expect_start(seat, until_s=now_s + START_TIMEOUT_S)
        self.membership.waiting = frozenset(waiting)

    def _withdraw_waiting(self) -> None:
        if waiting := self._engine.waiting():
            self._withdrawn.update(waiting)
            self._engine.stop(waiting)

    def _take_seats(self, count: int) -> list[int]:
        """New seats, on record before anybody has them: a driver that takes over must not give them out again."""
        seats = [self._seat_numbers.take() for _ in range(count)]
        self._stream.emit("seats_given", seats=[f"worker-{seat}" for seat in seats])
        return seats

    def _publish(self, action: PublishView) -> None:
        view = action.view
        if view.stop and view.saver is None:
            self._final_view = view
        for seat in action.seats:
            self._latest_views[seat] = view
        if view.carries and self._server_group:
            self._server_group.publish_view(view)
        self._control.publish_view(view, self.roster.connections_of(action.seats))
        if view.carries or action.why:
            self._stream.emit("view", **_view_fields(action))

    def _check_liveness(self, now_s: float) -> None:
        members = [m for m in self.membership.members.values() if self._expects_heartbeat(m.seat)]
        training = [m.seat for m in members if m.training]
        idle = [m.seat for m in members if not m.training]
        for failure in self._liveness.find_failures(now_s, training=training, idle=idle):
            self.evict(failure.seat, failure.why)
        if self._liveness.stalled:
            self.membership.exchange_stalled()

    def _expects_heartbeat(self, seat: int) -> bool:
        """When a worker was told to leave, or the run is stopping, a closed connection is normal for a while. A silent
        open one is not: a frozen worker would keep all others waiting."""
        peer = self.roster.get(seat)
        if peer is None:
            return False
        newest = self._latest_views.get(seat)
        is_ending = bool(self.membership.stop_reason) or (newest is not None and seat in newest.leave)
        is_closed = peer.disconnected_at_s is not None
        return not (is_ending and is_closed and self.roster.silence_s(seat) < EXIT_TIMEOUT_S)

    def _drop_remote_worker(self, seat: int) -> None:
        """Remove the worker. It cannot return to its seat."""
        self.roster.evict(seat, "lost")
        self.roster.disconnect(seat)
        self._remove_worker(seat)

    def _remove_worker(self, seat: int, *, left_cleanly: bool = False) -> None:
        self.membership.gone(seat, left_cleanly=left_cleanly)
        self.roster.remove(seat)
        self._latest_views.pop(seat, None)
        self._relays.pop(seat, None)
        self._launches.dismiss(seat)


def _view_fields(action: PublishView) -> dict[str, Any]:
    view = action.view
    row: dict[str, Any] = {"number": view.number, "why": action.why}
    if view.carries:
        row |= {
            "carries": {f"worker-{s}": lanes for s, lanes in view.carries.items()},
            "saver": f"worker-{view.saver}",
            "source": None if view.source is None else f"worker-{view.source}",
        }
    return row


def initial_workers(job: Job, nodes: Iterable[Node]) -> int:
    """The number of workers at the start: as many as the engine's machines have cores for, within the job's bounds."""
    room = sum(node.room(job.threads) for node in nodes)
    room -= room % job.workers_per_replica
    return max(job.workers.least, min(job.workers.most, room))
