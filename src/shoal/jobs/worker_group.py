"""The workers of one run, steered: what they say and how they end goes to `plan`, and its orders are carried out."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from shoal.events import Event, EventWriter
from shoal.events.stream import parse_event
from shoal.fleet.control_server import ControlMessage, ControlServer
from shoal.fleet.driver_address import DriverAddress, read_driver_address, write_driver_address
from shoal.fleet.engine import Exit
from shoal.fleet.engines.local import LocalEngine
from shoal.fleet.orphans import find_orphans
from shoal.jobs.command_handler import CommandHandler
from shoal.jobs.peer_status import RECONNECT_TIMEOUT_S, PeerStatus
from shoal.jobs.server_group import ServerGroup
from shoal.net import tls
from shoal.net.address import format_address
from shoal.net.handshake import new_token
from shoal.plan.failure_detector import FailureDetector, Heartbeat
from shoal.plan.membership_policy import PublishView, StartWorkers
from shoal.plan.sharded_membership import make_membership_policy
from shoal.spec.certificates import tls_contexts_for
from shoal.spec.chunk_table import ChunkTable
from shoal.spec.job import Job
from shoal.spec.run_paths import RunPaths
from shoal.spec.view import Address, Seat, View

WORKER_MODULE = "shoal.train.worker"
CHECK_INTERVAL_S = 0.1


class WorkerGroup:
    """Belongs to the thread that drives. `tick` after anything became readable, and now and then."""

    def __init__(
        self,
        job: Job,
        paths: RunPaths,
        engine: LocalEngine,
        stream: EventWriter,
        *,
        first_seat: int,
        trace: bool = False,
    ) -> None:
        tls.configure(tls_contexts_for(job))
        known = read_driver_address(paths.driver_address)
        token = known.token if known else new_token()
        self.control = ControlServer(token, listen=job.engine.listen, port=known.port if known else 0)
        write_driver_address(paths.driver_address, DriverAddress(self.control.host, self.control.port, token))
        self.membership = make_membership_policy(job, wanted_workers=initial_workers(job))
        self.deaths = 0
        self._job = job
        self._paths = paths
        self._engine = engine
        self._stream = stream
        self._next_seat = first_seat
        self.server_group = self._make_server_group()
        self._arguments = ["--run", str(paths.root), *(["--trace"] if trace else [])]
        self._failure_detector = FailureDetector()
        self._idle_failure_detector = FailureDetector()
        self._peers: dict[int, PeerStatus] = {}
        self._seat_by_connection: dict[int, int] = {}  # of callers
        self._evicted: dict[int, str] = {}  # seats that were put out, and why
        self._orphans: dict[int, float] = {}  # seats that should call back, and until when
        self._latest_views: dict[int, View] = {}
        self._final_view: View | None = None  # for those, too, who come after the end
        self._next_check_s = 0.0
        self._step = 0
        self._refused_by_seat: dict[int, int] = {}  # by the workers' doors
        self.commands = CommandHandler(self.membership, self.server_group)

    def _make_server_group(self) -> ServerGroup | None:
        sync, restarts = self._job.sync, self._job.engine.restarts
        if sync.kind != "server":
            return None
        engine, control, stream = self._engine, self.control, self._stream
        return ServerGroup(sync, self._paths, engine, control, stream, new_seat=self._new_seat, restarts=restarts)

    def start(self) -> None:
        """Find those who outlived an earlier driver; the rest is started as it is missed."""
        found = find_orphans(self._paths)
        self._next_seat = max([self._next_seat, *(one.seat.number + 1 for one in found)])
        for one in found:
            if one.seat.role == "worker":
                self._engine.adopt(one.seat.number, one.pid)
                self.membership.expect(one.seat.number)
                self._orphans[one.seat.number] = time.monotonic() + RECONNECT_TIMEOUT_S
        if self.server_group:
            self.server_group.start(one for one in found if one.seat.role == "server")

    def receive(self) -> None:
        """Take in what workers, servers and users say."""
        for said in self.control.receive():
            if said.kind == "here":
                self._handle_hello(said)
            elif self.server_group and self.server_group.owns_connection(said.connection):
                self.server_group.handle(said)
            elif (seat := self._seat_by_connection.get(said.connection)) is not None:
                self._handle_or_drop(seat, said)

    def apply_policy(self) -> int:
        """Look for those who hang, and do what the crew needs. Returns how many more workers are wanted."""
        now = time.monotonic()
        if now >= self._next_check_s:
            self._next_check_s = now + CHECK_INTERVAL_S
            self._check_liveness(now)
        wanted = 0
        for order in self.membership.decide(now):
            if isinstance(order, StartWorkers):
                wanted = order.count
            else:
                self._publish(order)
                if order.view.stop and order.view.saver is None:
                    self._final_view = order.view
        return wanted

    def tick_servers(self) -> str:
        """Do what the servers need. Returns why all that they held is lost, if it is."""
        if self.server_group is None:
            return ""
        heard = [voice.connection for voice in self._peers.values() if voice.disconnected_at_s is None]
        return self.server_group.tick(time.monotonic(), heard)

    def start_workers(self, number: int) -> None:
        """Start so many local workers."""
        seats = [self._new_seat() for _ in range(number)]
        for seat in seats:
            self.membership.expect(seat)
        self._engine.start([Seat(number=seat) for seat in seats], WORKER_MODULE, self._arguments)

    def handle_exit(self, one: Exit) -> str:
        """A local process is gone. Returns why, where that was not meant to be."""
        self._remove_worker(one.seat, well=one.code == 0)
        why = self._evicted.pop(one.seat, "")
        if one.code == 0:
            return ""
        self._stream.emit("worker_died", worker=f"worker-{one.seat}", reason=why or one.reason)
        self.deaths += 1
        return why or one.reason

    def stop(self, why: str) -> None:
        """Let one save, and all leave."""
        if not self.membership.stop_reason:
            self.membership.stop(why)

    def dismiss(self, why: str) -> None:
        """Let all leave as things are."""
        if self._final_view is None:
            order = self.membership.dismiss(why)
            self._final_view = order.view
            self._publish(order)

    def evict(self, seat: int, why: str) -> None:
        """Out of the view, whatever it does from now on."""
        voice = self._peers.get(seat)
        self._stream.emit("put_out", worker=f"worker-{seat}", host=voice.host if voice else "", reason=why)
        if seat in self._engine.seats:
            self._evicted[seat] = why
            self._engine.stop([seat])
        else:
            self._drop_remote_worker(seat)

    def evict_all(self, why: str) -> set[int]:
        """Everybody who may hold something, also those who outlived a driver and have not called yet. Their seats."""
        seats = {*self.membership.members, *self._orphans}
        self._orphans.clear()
        for seat in sorted(seats):
            self.evict(seat, why)
        return seats

    def seat(self, number: int) -> Seat:
        """A local seat, and whether a worker or a server sits in it."""
        return Seat(
            number=number, role="server" if self.server_group and number in self.server_group.seats else "worker"
        )

    @property
    def worker_seats(self) -> list[int]:
        """The local seats in which a worker sits."""
        return [number for number in self._engine.seats if self.seat(number).role == "worker"]

    @property
    def address(self) -> str:
        """Where workers and users call."""
        return format_address(self.control.host, self.control.port)

    @property
    def refused(self) -> int:
        """Callers that were turned away, here or at a worker's door: strangers, and those who were late."""
        return self.control.refused + sum(self._refused_by_seat.values())

    @property
    def has_live_state(self) -> bool:
        """Is anybody here who could go on without a checkpoint?"""
        return any(m.position or m.training for m in self.membership.members.values())

    def filenos(self) -> list[int]:
        return [self._engine.fileno(), self.control.fileno()]

    def close(self) -> None:
        """When the engine is closed. Those who were killed left their locks: these go too."""
        self.control.close()
        find_orphans(self._paths)

    # ---- what workers say ----

    def _handle_hello(self, message: ControlMessage) -> None:
        role = message.fields.get("role")
        if role == "server" and self.server_group:
            self.server_group.handle_hello(message)
            return
        if role != "worker":
            self._seat_by_connection[message.connection] = -1  # a user with a wish
            self.control.send(message.connection, "welcome", run=self._paths.name, threads=self._job.threads)
            return
        try:
            address = Address.model_validate(message.fields["address"])
            local, training = bool(message.fields["local"]), bool(message.fields["training"])
            view, pid, host = int(message.fields["view"]), int(message.fields["pid"]), str(message.fields["host"])
            told = message.fields.get("table")
            table = None if told is None else ChunkTable.model_validate(told)
        except (KeyError, TypeError, ValueError, ValidationError):
            self.control.drop(message.connection)
            return
        seat = self._seat_for(message.fields.get("seat"), local)
        holds_what_is_lost = view > 0 and self.server_group is not None and self.server_group.is_lost(table)
        if seat is None or holds_what_is_lost:
            self.control.drop(message.connection)
            return
        old = self._peers.get(seat)
        if old is not None and old.connection != message.connection:
            self._seat_by_connection.pop(old.connection, None)
            self.control.drop(old.connection)
        self._seat_by_connection[message.connection] = seat
        self._peers[seat] = PeerStatus(message.connection, pid, host, local)
        self._orphans.pop(seat, None)
        known = seat in self.membership.members
        self.membership.arrived(seat, local=local, address=address, view=view, training=training and not known)
        self.control.send(message.connection, "welcome", seat=seat, run=self._paths.name, **self._job_fields(local))
        if newest := self._final_view or self._latest_views.get(seat):
            self.control.publish_view(newest, [message.connection])
        if self.server_group:
            self.server_group.observe_chunk_table(table)
            self.server_group.send_chunk_table(message.connection)

    def _job_fields(self, local: bool) -> dict[str, Any]:
        return {} if local else {"job": self._job.dump()}

    def _seat_for(self, wanted: Any, local: bool) -> int | None:
        """The seat that it says it has, or a new one for who has none, or was put out of it."""
        if local:
            return wanted if isinstance(wanted, int) and wanted in self.worker_seats else None
        mine = wanted in self._engine.seats  # those are filled from here
        if isinstance(wanted, int) and not mine and wanted not in self._evicted and wanted >= 0:
            self._next_seat = max(self._next_seat, wanted + 1)
            return wanted
        return self._new_seat()

    def _new_seat(self) -> int:
        self._next_seat += 1
        return self._next_seat - 1

    def _handle_or_drop(self, seat: int, message: ControlMessage) -> None:
        """What makes no sense costs the caller its connection, and nobody else anything."""
        try:
            self._handle(seat, message)
        except (KeyError, TypeError, ValueError):
            self.control.drop(message.connection)
            self._handle(seat, ControlMessage(message.connection, "lost", {}))

    def _handle(self, seat: int, message: ControlMessage) -> None:
        fields = message.fields
        if seat == -1:
            self._dispatch_command(message)
        elif message.kind == "beat":
            self._handle_heartbeat(seat, fields)
        elif message.kind == "standing":
            position = None if fields["position"] is None else int(fields["position"])
            saved = bool(fields.get("saved"))
            self.membership.stopped_at(
                seat, time.monotonic(), view=int(fields["view"]), position=position, checkpointed=saved
            )
        elif message.kind == "cuts" and self.server_group:
            self.server_group.set_chunk_boundaries(fields["cuts"])
        elif message.kind == "event":
            self._relay(seat, str(fields.get("row", "")))
        elif message.kind == "lost":
            self._seat_by_connection.pop(message.connection, None)
            self._peers[seat].disconnected_at_s = time.monotonic()  # it ends, or calls again
            if not self._peers[seat].local:
                if not self._peers[seat].said_bye:
                    self._stream.emit("worker_died", worker=f"worker-{seat}", reason="its connection was lost")
                    self.deaths += 1
                self._drop_remote_worker(seat)
        elif message.kind == "bye":
            self._peers[seat].said_bye = True

    def _handle_heartbeat(self, seat: int, fields: Mapping[str, Any]) -> None:
        self._peers[seat].last_heartbeat = fields
        self._refused_by_seat[seat] = max(self._refused_by_seat.get(seat, 0), int(fields.get("refused", 0)))
        if fields.get("lane_s"):
            self.membership.record_lane_time(seat, float(fields["lane_s"]))
        if fields.get("leaving"):
            self.membership.drain(seat, "terminated", replace=True)

    def _relay(self, seat: int, row: str) -> None:
        """What a worker tells that cannot reach the run's directory. Its failure is its own, not the run's."""
        event = parse_event(row.encode())
        if event is None or event.who != f"worker-{seat}":
            return
        if event.kind == "failed":
            message = f"{event.who} ({self._peers[seat].host}) failed: {event.get('message')}"
            event = Event("note", event.t, event.who, event.step, {"message": message})
        self._stream.append(event)

    def _dispatch_command(self, message: ControlMessage) -> None:
        """A user's wish, and how things stand after it."""
        if message.kind == "lost":
            self._seat_by_connection.pop(message.connection, None)
            return
        self.commands.handle(message.kind, message.fields)
        self.control.send(message.connection, "answer", **self.commands.status())

    # ---- acts ----

    def _publish(self, order: PublishView) -> None:
        for seat in order.seats:
            self._latest_views[seat] = order.view
        callers = [self._peers[seat].connection for seat in order.seats if seat in self._peers]
        self.control.publish_view(order.view, callers)
        if order.view.carries or order.why:
            self._stream.emit("view", **_view_fields(order))

    def _check_liveness(self, now: float) -> None:
        for seat in [s for s, until in self._orphans.items() if now > until]:
            del self._orphans[seat]
            self.evict(seat, "it outlived its driver and did not call back")
        signs = [
            self._peers[m.seat].heartbeat(m.seat, self.control)
            for m in self.membership.members.values()
            if m.training and self._expects_heartbeat(m.seat)
        ]
        step = max((sign.step for sign in signs), default=0)
        if step > self._step:
            self._failure_detector.reset_before(step - 1)
            self._step = step
        for verdict in self._failure_detector.check(now, signs):
            self.evict(verdict.seat, verdict.why)
        if self._failure_detector.stalled:
            self.membership.exchange_stalled()
        for verdict in self._idle_failure_detector.check(now, self._idle_heartbeats()):
            self.evict(verdict.seat, verdict.why)

    def _idle_heartbeats(self) -> list[Heartbeat]:
        """Those who do not train, and may be waited for: whether they live counts, not how long they take."""
        seats = [m.seat for m in self.membership.members.values() if not m.training and not m.leaving]
        return [
            replace(self._peers[seat].heartbeat(seat, self.control), since_s=0.0)
            for seat in seats
            if self._expects_heartbeat(seat)
        ]

    def _expects_heartbeat(self, seat: int) -> bool:
        """Who leaves at a stop closes its connection first; others could not leave without one that is frozen."""
        voice = self._peers.get(seat)
        return voice is not None and not (self.membership.stop_reason and voice.disconnected_at_s is not None)

    def _drop_remote_worker(self, seat: int) -> None:
        """A worker from elsewhere: its old seat is closed to it."""
        self._evicted[seat] = "lost"
        voice = self._peers.get(seat)
        if voice is not None:
            self._seat_by_connection.pop(voice.connection, None)
            self.control.drop(voice.connection)
        self._remove_worker(seat)

    def _remove_worker(self, seat: int, *, well: bool = False) -> None:
        self.membership.gone(seat, left_cleanly=well)
        voice = self._peers.pop(seat, None)
        if voice is not None:
            self._seat_by_connection.pop(voice.connection, None)
        self._latest_views.pop(seat, None)
        self._orphans.pop(seat, None)


def _view_fields(order: PublishView) -> dict[str, Any]:
    view = order.view
    row: dict[str, Any] = {"number": view.number, "why": order.why}
    if view.carries:
        row |= {
            "carries": {f"worker-{s}": lanes for s, lanes in view.carries.items()},
            "saver": f"worker-{view.saver}",
            "source": None if view.source is None else f"worker-{view.source}",
        }
    return row


def initial_workers(job: Job) -> int:
    """How many workers to begin with: what the job says, or as many as this machine has room for."""
    room = len(os.sched_getaffinity(0)) // job.threads
    room -= room % job.workers_per_replica
    return max(job.workers.least, min(job.workers.most, room))
