"""The workers of one run: their messages and exits go to the membership policy, and its actions are carried out."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from shoal.events import Event, EventWriter
from shoal.events.checks import is_count, is_finite
from shoal.events.stream import parse_event
from shoal.fleet.control_server import ControlMessage, ControlServer
from shoal.fleet.engine import Engine, Exit, Launch, Node
from shoal.fleet.roster import RECONNECT_TIMEOUT_S, START_TIMEOUT_S, Peer, Roster, SeatNumbers
from shoal.jobs.liveness import LivenessCheck
from shoal.jobs.server_group import ServerGroup
from shoal.net.host_id import host_id
from shoal.plan.membership_policy import MembershipAction, PublishView, StartWorkers
from shoal.plan.sharded_membership import make_membership_policy
from shoal.spec.chunk_table import ChunkTable
from shoal.spec.job import Job
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Address, Attachment, Seat, View

WORKER_MODULE = "shoal.train.worker"
EXIT_TIMEOUT_S = 10.0
"""Seconds that a worker has to exit after its connection was closed, if it was told to leave."""


class WorkerGroup:
    """A roster of workers and the membership policy. Belongs to the driver's thread.

    Call `tick` whenever something is readable, and periodically. `server_group` is None for a run without servers; it
    supplies the chunk table that is sent to workers.
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
        trace: bool = False,
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
        self._arguments = ("--run", str(paths.root), *(["--trace"] if trace else []))
        self._liveness = LivenessCheck(self.roster)
        self._latest_views: dict[int, View] = {}
        self._final_view: View | None = None  # also sent to workers that connect after the end
        self._refused_by_seat: dict[int, int] = {}  # connections that the workers' own listeners refused, by seat

    def start(self, reattached: Iterable[int]) -> None:
        """Expect the workers that outlived an earlier driver. `tick` starts the missing ones."""
        for seat in reattached:
            self.membership.expect(seat)
            self.roster.expect_back(seat, until_s=time.monotonic() + RECONNECT_TIMEOUT_S)

    def tick(self) -> list[MembershipAction]:
        """Evict failed workers, then carry out the policy's actions and return them."""
        now = time.monotonic()
        if self._liveness.is_due(now):
            self._check_liveness(now)
        actions = self.membership.decide(now)
        for action in actions:
            if isinstance(action, StartWorkers):
                self._start_workers(action.count)
            else:
                self._publish(action)
        return actions

    def handle_exit(self, one: Exit) -> str:
        """Handle the exit of a worker of the engine. Returns why it died, or '' if it exited cleanly."""
        self._remove_worker(one.seat, left_cleanly=one.code == 0)
        why = self.roster.readmit(one.seat)
        if one.code == 0:
            return ""
        self._stream.emit("worker_died", worker=f"worker-{one.seat}", reason=why or one.reason)
        return why or one.reason

    def stop(self, why: str) -> None:
        """Stop at a step boundary: one worker saves, then all exit."""
        if not self.membership.stop_reason:
            self.membership.stop(why)

    def dismiss(self, why: str) -> None:
        """Let all workers exit immediately, without saving."""
        if self._final_view is None:
            self._publish(self.membership.dismiss(why))

    def evict(self, seat: int, why: str) -> None:
        """Remove the worker from the run, and kill it if the engine runs it."""
        self._stream.emit("evicted", worker=f"worker-{seat}", host=self.roster.host(seat), reason=why)
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

    # ---- messages of workers ----

    def handle_hello(self, message: ControlMessage) -> None:
        """A worker connects. It is refused if its hello is malformed, its seat invalid, or its state lost by
        servers."""
        fields = message.fields
        try:
            address = Address.model_validate(fields["address"])
            attachment = Attachment.model_validate(fields["attachment"])
            training, view = bool(fields["training"]), int(fields["view"])
            peer = Peer(
                message.connection,
                int(fields["pid"]),
                str(fields["host"]),
                managed=attachment.managed,
                same_host=address.host_id == host_id(),
            )
            told = fields.get("table")
            table = None if told is None else ChunkTable.model_validate(told)
        except (KeyError, TypeError, ValueError, ValidationError):
            self._control.drop(message.connection)
            return
        seat = self._seat_for(fields.get("seat"), managed=attachment.managed)
        holds_what_is_lost = view > 0 and self._server_group is not None and self._server_group.is_lost(table)
        if seat is None or holds_what_is_lost:
            self._control.drop(message.connection)
            return
        self.roster.connect(seat, peer)
        known = seat in self.membership.members
        self.membership.arrived(seat, attachment, address=address, view=view, training=training and not known)
        job = {"job": self._job.dump()} if attachment.needs_job else {}
        self._control.send(message.connection, "welcome", seat=seat, run=self._paths.name, **job)
        if self._final_view and self._final_view.number <= view:  # the worker ignores a number below its newest
            self._final_view = self._final_view.model_copy(update={"number": view + 1})
        if newest := self._final_view or self._latest_views.get(seat):
            self._control.publish_view(newest, [message.connection])
        if self._server_group:
            self._server_group.observe_chunk_table(table)
            self._server_group.send_chunk_table(message.connection)

    def _seat_for(self, wanted: Any, *, managed: bool) -> int | None:
        """The seat that the worker claims, or a new one if a remote worker has none or was evicted from it."""
        if managed:
            return wanted if isinstance(wanted, int) and wanted in self.seats else None
        ours = wanted in self._engine.running()  # the engine starts the workers of these seats
        if isinstance(wanted, int) and not ours and not self.roster.is_evicted(wanted) and wanted >= 0:
            self._seat_numbers.reserve(wanted)
            return wanted
        return self._seat_numbers.take()

    def handle(self, message: ControlMessage) -> None:
        """Handle a worker's message. A malformed message closes the connection of this worker only."""
        seat = self.roster.seat_of(message.connection)
        if seat is None:
            return
        try:
            self._handle(seat, message)
        except (KeyError, TypeError, ValueError):
            self._control.drop(message.connection)
            self._handle_lost(seat)

    def _handle(self, seat: int, message: ControlMessage) -> None:
        fields = message.fields
        if message.kind == "beat":
            self._handle_heartbeat(seat, fields)
        elif message.kind == "standing":
            position = None if fields["position"] is None else int(fields["position"])
            saved = bool(fields.get("saved"))
            self.membership.stopped_at(
                seat, time.monotonic(), view=int(fields["view"]), position=position, checkpointed=saved
            )
        elif message.kind == "cuts" and self._server_group:
            self._server_group.set_chunk_boundaries(fields["cuts"])
        elif message.kind == "event":
            self._relay(seat, str(fields.get("row", "")))
        elif message.kind == "lost":
            self._handle_lost(seat)
        elif message.kind == "bye":
            self.roster[seat].said_bye = True

    def _handle_lost(self, seat: int) -> None:
        """A connection is lost. A managed worker reconnects or the engine reports its exit. A remote one is removed."""
        self.roster.disconnect(seat)
        peer = self.roster[seat]
        if peer.managed:
            return
        if not peer.said_bye:
            self._stream.emit("worker_died", worker=f"worker-{seat}", reason="its connection was lost")
        self._drop_remote_worker(seat)

    def _handle_heartbeat(self, seat: int, fields: Mapping[str, Any]) -> None:
        self.roster[seat].last_heartbeat = fields
        self._refused_by_seat[seat] = max(self._refused_by_seat.get(seat, 0), int(fields.get("refused", 0)))
        if fields.get("lane_s"):
            self.membership.record_lane_time(seat, float(fields["lane_s"]))
        if fields.get("lanes_timed"):
            count, total_s = fields["lanes_timed"]
            if not (is_count(count) and is_finite(total_s)):
                raise ValueError(f"{count} lanes in {total_s} s")
            self.membership.observe_lanes(seat, time.monotonic(), count=count, total_s=float(total_s))
        if fields.get("leaving"):
            self.membership.drain(seat, "terminated", replace=True)

    def _relay(self, seat: int, row: str) -> None:
        """Write the event of a worker that cannot reach the run directory. The failure of a remote worker does not fail
        the run."""
        event = parse_event(row.encode())
        if event is None or event.who != f"worker-{seat}":
            return
        if event.kind == "failed":
            message = f"{event.who} ({self.roster.host(seat)}) failed: {event.get('message')}"
            event = Event("note", event.t, event.who, event.step, {"message": message})
        self._stream.append(event)

    # ---- actions ----

    def _start_workers(self, count: int) -> None:
        seats = [self._seat_numbers.take() for _ in range(count)]
        for seat in seats:
            self.membership.expect(seat)
            self.roster.expect_start(seat, until_s=time.monotonic() + START_TIMEOUT_S)
        self._engine.start([Launch(Seat(number=seat), WORKER_MODULE, self._arguments) for seat in seats])

    def _publish(self, action: PublishView) -> None:
        view = action.view
        if view.stop and view.saver is None:
            self._final_view = view
        for seat in action.seats:
            self._latest_views[seat] = view
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
    room = sum(node.cores // job.threads for node in nodes)
    room -= room % job.workers_per_replica
    return max(job.workers.least, min(job.workers.most, room))
