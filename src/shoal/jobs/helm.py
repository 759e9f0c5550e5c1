"""The workers of one run, steered: what they say and how they end goes to `plan`, and its orders are carried out."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from shoal.events import Event, Stream
from shoal.events.stream import parse
from shoal.fleet.contact import Contact, read_contact, write_contact
from shoal.fleet.control import Control, Said
from shoal.fleet.engine import Exit
from shoal.fleet.engines.local import LocalEngine
from shoal.fleet.survivors import survivors
from shoal.jobs.grants import Grants
from shoal.jobs.harbour import Harbour
from shoal.jobs.voice import CALL_BACK_S, Voice
from shoal.plan.crew import Publish, Start
from shoal.plan.grid_crew import crew_for
from shoal.plan.suspicion import Sign, Suspicion
from shoal.spec.certificates import certificates_of
from shoal.spec.job import Job
from shoal.spec.paths import RunPaths
from shoal.spec.table import Table
from shoal.spec.view import Address, Seat, View
from shoal.wire import tls
from shoal.wire.handshake import new_token

WORKER = "shoal.train.worker"
LOOK_S = 0.1


class Helm:
    """Belongs to the thread that drives. `tick` after anything became readable, and now and then."""

    def __init__(
        self, job: Job, paths: RunPaths, engine: LocalEngine, stream: Stream, *, first_seat: int, trace: bool = False
    ) -> None:
        tls.use(certificates_of(job))
        known = read_contact(paths.control)
        token = known.token if known else new_token()
        self.control = Control(token, listen=job.engine.listen, port=known.port if known else 0)
        write_contact(paths.control, Contact(self.control.host, self.control.port, token))
        self.crew = crew_for(job, wanted=first_number(job))
        self.deaths = 0
        self._job = job
        self._paths = paths
        self._engine = engine
        self._stream = stream
        self._next_seat = first_seat
        self.harbour = self._make_harbour()
        self._arguments = ["--run", str(paths.root), *(["--trace"] if trace else [])]
        self._suspicion = Suspicion()
        self._bystanders = Suspicion()
        self._voices: dict[int, Voice] = {}
        self._seats: dict[int, int] = {}  # of callers
        self._out: dict[int, str] = {}  # seats that were put out, and why
        self._orphans: dict[int, float] = {}  # seats that should call back, and until when
        self._latest: dict[int, View] = {}
        self._farewell: View | None = None  # for those, too, who come after the end
        self._look_at = 0.0
        self._step = 0
        self._refused: dict[int, int] = {}  # by the workers' doors
        self.grants = Grants(self.crew, self.harbour)

    def _make_harbour(self) -> Harbour | None:
        sync, restarts = self._job.sync, self._job.engine.restarts
        if sync.kind != "server":
            return None
        engine, control, stream = self._engine, self.control, self._stream
        return Harbour(sync, self._paths, engine, control, stream, new_seat=self._new_seat, restarts=restarts)

    def start(self) -> None:
        """Find those who outlived an earlier driver; the rest is started as it is missed."""
        found = survivors(self._paths)
        self._next_seat = max([self._next_seat, *(one.seat.number + 1 for one in found)])
        for one in found:
            if one.seat.role == "worker":
                self._engine.adopt(one.seat.number, one.pid)
                self.crew.expect(one.seat.number)
                self._orphans[one.seat.number] = time.monotonic() + CALL_BACK_S
        if self.harbour:
            self.harbour.start(one for one in found if one.seat.role == "server")

    def hear(self) -> None:
        """Take in what workers, servers and users say."""
        for said in self.control.take():
            if said.kind == "here":
                self._here(said)
            elif self.harbour and self.harbour.knows(said.caller):
                self.harbour.hear(said)
            elif (seat := self._seats.get(said.caller)) is not None:
                self._understand(seat, said)

    def steer(self) -> int:
        """Look for those who hang, and do what the crew needs. Returns how many more workers are wanted."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._suspect(now)
        wanted = 0
        for order in self.crew.orders(now):
            if isinstance(order, Start):
                wanted = order.number
            else:
                self._publish(order)
                if order.view.stop and order.view.saver is None:
                    self._farewell = order.view
        return wanted

    def tend(self) -> str:
        """Do what the servers need. Returns why all that they held is lost, if it is."""
        if self.harbour is None:
            return ""
        heard = [voice.caller for voice in self._voices.values() if voice.lost_s is None]
        return self.harbour.tend(time.monotonic(), heard)

    def fill(self, number: int) -> None:
        """Start so many local workers."""
        seats = [self._new_seat() for _ in range(number)]
        for seat in seats:
            self.crew.expect(seat)
        self._engine.start([Seat(number=seat) for seat in seats], WORKER, self._arguments)

    def ended(self, one: Exit) -> str:
        """A local process is gone. Returns why, where that was not meant to be."""
        self._forget(one.seat, well=one.code == 0)
        why = self._out.pop(one.seat, "")
        if one.code == 0:
            return ""
        self._stream.emit("worker_died", worker=f"worker-{one.seat}", reason=why or one.reason)
        self.deaths += 1
        return why or one.reason

    def stop(self, why: str) -> None:
        """Let one save, and all leave."""
        if not self.crew.stopping:
            self.crew.stop(why)

    def dismiss(self, why: str) -> None:
        """Let all leave as things are."""
        if self._farewell is None:
            order = self.crew.dismiss(why)
            self._farewell = order.view
            self._publish(order)

    def put_out(self, seat: int, why: str) -> None:
        """Out of the view, whatever it does from now on."""
        voice = self._voices.get(seat)
        self._stream.emit("put_out", worker=f"worker-{seat}", host=voice.host if voice else "", reason=why)
        if seat in self._engine.seats:
            self._out[seat] = why
            self._engine.stop([seat])
        else:
            self._lost(seat)

    def put_all_out(self, why: str) -> set[int]:
        """Everybody who may hold something, also those who outlived a driver and have not called yet. Their seats."""
        seats = {*self.crew.members, *self._orphans}
        self._orphans.clear()
        for seat in sorted(seats):
            self.put_out(seat, why)
        return seats

    def seat(self, number: int) -> Seat:
        """A local seat, and whether a worker or a server sits in it."""
        return Seat(number=number, role="server" if self.harbour and number in self.harbour.seats else "worker")

    @property
    def working(self) -> list[int]:
        """The local seats in which a worker sits."""
        return [number for number in self._engine.seats if self.seat(number).role == "worker"]

    @property
    def address(self) -> str:
        """Where workers and users call."""
        host = self.control.host
        return f"[{host}]:{self.control.port}" if ":" in host else f"{host}:{self.control.port}"

    @property
    def refused(self) -> int:
        """Callers that were turned away, here or at a worker's door: strangers, and those who were late."""
        return self.control.refused + sum(self._refused.values())

    @property
    def alive(self) -> bool:
        """Is anybody here who could go on without a checkpoint?"""
        return any(m.position or m.training for m in self.crew.members.values())

    def filenos(self) -> list[int]:
        return [self._engine.fileno(), self.control.fileno()]

    def close(self) -> None:
        """When the engine is closed. Those who were killed left their locks: these go too."""
        self.control.close()
        survivors(self._paths)

    # ---- what workers say ----

    def _here(self, said: Said) -> None:
        role = said.fields.get("role")
        if role == "server" and self.harbour:
            self.harbour.welcome(said)
            return
        if role != "worker":
            self._seats[said.caller] = -1  # a user with a wish
            self.control.send(said.caller, "welcome", run=self._paths.name, threads=self._job.threads)
            return
        try:
            address = Address.model_validate(said.fields["address"])
            local, training = bool(said.fields["local"]), bool(said.fields["training"])
            view, pid, host = int(said.fields["view"]), int(said.fields["pid"]), str(said.fields["host"])
            told = said.fields.get("table")
            table = None if told is None else Table.model_validate(told)
        except (KeyError, TypeError, ValueError, ValidationError):
            self.control.drop(said.caller)
            return
        seat = self._seat_for(said.fields.get("seat"), local)
        holds_what_is_lost = view > 0 and self.harbour is not None and self.harbour.is_void(table)
        if seat is None or holds_what_is_lost:
            self.control.drop(said.caller)
            return
        old = self._voices.get(seat)
        if old is not None and old.caller != said.caller:
            self._seats.pop(old.caller, None)
            self.control.drop(old.caller)
        self._seats[said.caller] = seat
        self._voices[seat] = Voice(said.caller, pid, host, local)
        self._orphans.pop(seat, None)
        known = seat in self.crew.members
        self.crew.arrived(seat, local=local, address=address, view=view, training=training and not known)
        self.control.send(said.caller, "welcome", seat=seat, run=self._paths.name, **self._job_for(local))
        if newest := self._farewell or self._latest.get(seat):
            self.control.publish(newest, [said.caller])
        if self.harbour:
            self.harbour.known(table)
            self.harbour.show(said.caller)

    def _job_for(self, local: bool) -> dict[str, Any]:
        return {} if local else {"job": self._job.dump()}

    def _seat_for(self, wanted: Any, local: bool) -> int | None:
        """The seat that it says it has, or a new one for who has none, or was put out of it."""
        if local:
            return wanted if isinstance(wanted, int) and wanted in self.working else None
        mine = wanted in self._engine.seats  # those are filled from here
        if isinstance(wanted, int) and not mine and wanted not in self._out and wanted >= 0:
            self._next_seat = max(self._next_seat, wanted + 1)
            return wanted
        return self._new_seat()

    def _new_seat(self) -> int:
        self._next_seat += 1
        return self._next_seat - 1

    def _understand(self, seat: int, said: Said) -> None:
        """What makes no sense costs the caller its connection, and nobody else anything."""
        try:
            self._hear(seat, said)
        except (KeyError, TypeError, ValueError):
            self.control.drop(said.caller)
            self._hear(seat, Said(said.caller, "lost", {}))

    def _hear(self, seat: int, said: Said) -> None:
        fields = said.fields
        if seat == -1:
            self._obey(said)
        elif said.kind == "beat":
            self._beat(seat, fields)
        elif said.kind == "standing":
            position = None if fields["position"] is None else int(fields["position"])
            saved = bool(fields.get("saved"))
            self.crew.stands(seat, time.monotonic(), view=int(fields["view"]), position=position, saved=saved)
        elif said.kind == "cuts" and self.harbour:
            self.harbour.sized(fields["cuts"])
        elif said.kind == "event":
            self._relay(seat, str(fields.get("row", "")))
        elif said.kind == "lost":
            self._seats.pop(said.caller, None)
            self._voices[seat].lost_s = time.monotonic()  # it ends, or calls again
            if not self._voices[seat].local:
                if not self._voices[seat].parted:
                    self._stream.emit("worker_died", worker=f"worker-{seat}", reason="its connection was lost")
                    self.deaths += 1
                self._lost(seat)
        elif said.kind == "bye":
            self._voices[seat].parted = True

    def _beat(self, seat: int, fields: Mapping[str, Any]) -> None:
        self._voices[seat].beat = fields
        self._refused[seat] = max(self._refused.get(seat, 0), int(fields.get("refused", 0)))
        if fields.get("lane_s"):
            self.crew.measured(seat, float(fields["lane_s"]))
        if fields.get("leaving"):
            self.crew.leaves(seat, "terminated", replace=True)

    def _relay(self, seat: int, row: str) -> None:
        """What a worker tells that cannot reach the run's directory. Its failure is its own, not the run's."""
        event = parse(row.encode())
        if event is None or event.who != f"worker-{seat}":
            return
        if event.kind == "failed":
            message = f"{event.who} ({self._voices[seat].host}) failed: {event.get('message')}"
            event = Event("note", event.t, event.who, event.step, {"message": message})
        self._stream.pass_on(event)

    def _obey(self, said: Said) -> None:
        """A user's wish, and how things stand after it."""
        if said.kind == "lost":
            self._seats.pop(said.caller, None)
            return
        self.grants.grant(said.kind, said.fields)
        self.control.send(said.caller, "answer", **self.grants.facts())

    # ---- acts ----

    def _publish(self, order: Publish) -> None:
        for seat in order.to:
            self._latest[seat] = order.view
        callers = [self._voices[seat].caller for seat in order.to if seat in self._voices]
        self.control.publish(order.view, callers)
        if order.view.carries or order.why:
            self._stream.emit("view", **_told(order))

    def _suspect(self, now: float) -> None:
        for seat in [s for s, until in self._orphans.items() if now > until]:
            del self._orphans[seat]
            self.put_out(seat, "it outlived its driver and did not call back")
        signs = [
            self._voices[m.seat].sign(m.seat, self.control)
            for m in self.crew.members.values()
            if m.training and self._should_talk(m.seat)
        ]
        step = max((sign.step for sign in signs), default=0)
        if step > self._step:
            self._suspicion.forgive(step - 1)
            self._step = step
        for verdict in self._suspicion.look(now, signs):
            self.put_out(verdict.seat, verdict.why)
        if self._suspicion.stuck:
            self.crew.stuck()
        for verdict in self._bystanders.look(now, self._idle()):
            self.put_out(verdict.seat, verdict.why)

    def _idle(self) -> list[Sign]:
        """Those who do not train, and may be waited for: whether they live counts, not how long they take."""
        seats = [m.seat for m in self.crew.members.values() if not m.training and not m.leaving]
        return [
            replace(self._voices[seat].sign(seat, self.control), since_s=0.0)
            for seat in seats
            if self._should_talk(seat)
        ]

    def _should_talk(self, seat: int) -> bool:
        """Who leaves at a stop closes its connection first; others could not leave without one that is frozen."""
        voice = self._voices.get(seat)
        return voice is not None and not (self.crew.stopping and voice.lost_s is not None)

    def _lost(self, seat: int) -> None:
        """A worker from elsewhere: its old seat is closed to it."""
        self._out[seat] = "lost"
        voice = self._voices.get(seat)
        if voice is not None:
            self._seats.pop(voice.caller, None)
            self.control.drop(voice.caller)
        self._forget(seat)

    def _forget(self, seat: int, *, well: bool = False) -> None:
        self.crew.gone(seat, well=well)
        voice = self._voices.pop(seat, None)
        if voice is not None:
            self._seats.pop(voice.caller, None)
        self._latest.pop(seat, None)
        self._orphans.pop(seat, None)


def _told(order: Publish) -> dict[str, Any]:
    view = order.view
    row: dict[str, Any] = {"number": view.number, "why": order.why}
    if view.carries:
        row |= {
            "carries": {f"worker-{s}": lanes for s, lanes in view.carries.items()},
            "saver": f"worker-{view.saver}",
            "source": None if view.source is None else f"worker-{view.source}",
        }
    return row


def first_number(job: Job) -> int:
    """How many workers to begin with: what the job says, or as many as this machine has room for."""
    room = len(os.sched_getaffinity(0)) // job.threads
    room -= room % job.ways
    return max(job.workers.least, min(job.workers.most, room))
